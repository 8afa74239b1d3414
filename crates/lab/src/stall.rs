//! How long processes of this machine had to wait for a CPU or a disk. Time limits of the product hold on a machine that has
//! both free; a test that runs beside a build must not fail because of the build.

use std::{
    fs, thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use nix::time::{ClockId, clock_gettime};

/// Measures a time span without the part in which the machine was overloaded.
pub struct StallClock {
    started: Instant,
    stalled_before: Duration,
}

impl StallClock {
    #[must_use]
    pub fn start() -> Self {
        Self { started: Instant::now(), stalled_before: stalled_since_boot() }
    }

    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// The elapsed time without stalls.
    pub fn unstalled(&self) -> Duration {
        unstalled(self.elapsed(), stalled_since_boot().saturating_sub(self.stalled_before))
    }
}

/// At least a tenth of the time counts, however overloaded the machine is, so that every limit ends.
fn unstalled(elapsed: Duration, stalled: Duration) -> Duration {
    elapsed.saturating_sub(stalled).max(elapsed / 10)
}

/// The time in which at least one process waited for a CPU or a disk. Zero on kernels without pressure stall information,
/// where all time counts.
fn stalled_since_boot() -> Duration {
    ["cpu", "io"]
        .into_iter()
        .filter_map(|resource| fs::read_to_string(format!("/proc/pressure/{resource}")).ok())
        .filter_map(|text| parse_total(&text))
        .sum()
}

/// The total of the line `some` of a file in /proc/pressure, in microseconds there.
fn parse_total(text: &str) -> Option<Duration> {
    let some = text.lines().find_map(|line| line.strip_prefix("some "))?;
    let total = some.split(' ').find_map(|field| field.strip_prefix("total="))?;
    total.parse().ok().map(Duration::from_micros)
}

/// The share of the machine's CPUs that a new process gets, between 0 and 1: less than 1 if other processes use them. For
/// limits of work that keeps all CPUs busy itself, which would count as a stall.
pub fn available_cpu_share() -> Result<f64> {
    const PERIOD: Duration = Duration::from_millis(200);
    let count = thread::available_parallelism().context("count the CPUs")?.get();
    let shares: Result<Vec<f64>> = thread::scope(|scope| {
        let spinning: Vec<_> = (0..count).map(|_| scope.spawn(|| spin(PERIOD))).collect();
        let join = |thread: thread::ScopedJoinHandle<'_, Result<f64>>| thread.join().unwrap_or(Ok(0.0));
        spinning.into_iter().map(join).collect()
    });
    let shares = shares?;
    Ok(shares.iter().sum::<f64>() / f64::from(u32::try_from(shares.len())?))
}

/// Keeps a CPU busy, and returns the part of the time in which this thread had one.
fn spin(period: Duration) -> Result<f64> {
    let used = || clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map(Duration::from);
    let (start, before) = (Instant::now(), used().context("read the thread's CPU time")?);
    while start.elapsed() < period {
        std::hint::spin_loop();
    }
    let used = used().context("read the thread's CPU time")?.saturating_sub(before);
    Ok(used.div_duration_f64(start.elapsed()).min(1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_total_of_the_kernels_pressure_file() {
        let text = "some avg10=1.54 avg60=6.20 avg300=7.09 total=5974052539\nfull avg10=0.00 total=7\n";
        assert_eq!(parse_total(text), Some(Duration::from_micros(5_974_052_539)));
        assert_eq!(parse_total("full avg10=0.00 total=7\n"), None);
        assert_eq!(parse_total(""), None);
    }

    #[test]
    fn a_busy_machine_gives_a_smaller_share() {
        let alone = available_cpu_share().unwrap();
        assert!(alone > 0.0 && alone <= 1.0, "{alone}");
        let count = 8 * thread::available_parallelism().unwrap().get();
        let beside = thread::scope(|scope| {
            for _ in 0..count {
                scope.spawn(|| spin(Duration::from_secs(1)));
            }
            available_cpu_share().unwrap()
        });
        assert!(beside < 0.5, "{beside} beside {count} threads");
    }

    #[test]
    fn stalls_do_not_count_but_a_tenth_of_the_time_always_does() {
        let secs = Duration::from_secs;
        assert_eq!(unstalled(secs(10), secs(0)), secs(10));
        assert_eq!(unstalled(secs(10), secs(4)), secs(6));
        assert_eq!(unstalled(secs(10), secs(40)), secs(1));
    }
}
