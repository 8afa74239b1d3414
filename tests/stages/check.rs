//! `make test` and `make soak`: runs every stage and prints a summary.

use std::{
    env,
    ffi::OsString,
    fmt::Write as _,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    process::Command,
    thread,
    time::Instant,
};

use anyhow::{Result, anyhow, bail};
use lab::print_progress;

use crate::{
    image, packages,
    step::{TestResults, cargo, low_priority_cargo, run_command, run_tests},
    test_program::{self, TargetKind, TestProgram},
};

/// How long the repeated and randomized tests run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TestLength {
    Short,
    Long,
}

struct StageResult {
    name: &'static str,
    passed: bool,
    tests: Option<TestResults>,
    seconds: f64,
}

/// The test programs of a stage.
enum Selection {
    /// The tests beside the code of all packages.
    Unit,
    /// The examples in doc comments, which cargo compiles and runs itself.
    Doc,
    /// The test programs of a package, by its directory.
    Package(&'static str),
    /// The test programs of all packages that no other stage runs.
    Rest,
    /// One test program of this package.
    EndToEnd(&'static str),
}

/// A group of tests: its name, its programs and their arguments.
struct TestStage(&'static str, Selection, &'static [&'static str]);

/// The stages of a group run in parallel: they mostly wait, and each has its own lab. The compiler works meanwhile.
const STAGES_BESIDE_BUILDS: &[&[TestStage]] = &[
    &[TestStage("unit", Selection::Unit, &[])],
    &[TestStage("doc examples", Selection::Doc, &[])],
    &[TestStage("command line", Selection::Package("crates/patchbay"), &[])],
    &[TestStage("dependencies", Selection::EndToEnd("dependencies"), &[])],
    &[TestStage("kernel", Selection::Rest, &[])],
    &[
        TestStage("controller", Selection::EndToEnd("control_plane"), &[]),
        TestStage("networks", Selection::EndToEnd("networks"), &[]),
        TestStage("addresses", Selection::EndToEnd("addresses"), &[]),
        TestStage("services", Selection::EndToEnd("services"), &[]),
        TestStage("claims", Selection::EndToEnd("claims"), &[]),
    ],
];

/// The stages that need the image, or the machine for themselves. Those of a group run in parallel.
const STAGES_ALONE: &[&[TestStage]] = &[
    // Compares the state of the whole host and measures starts, so nothing else may run meanwhile.
    &[TestStage("lab", Selection::EndToEnd("lab"), &["--test-threads=1"])],
    &[TestStage("nodes", Selection::EndToEnd("nodes"), &[])],
    &[TestStage("hotplug", Selection::EndToEnd("hotplug"), &[])],
    &[TestStage("machines", Selection::EndToEnd("machines"), &[])],
];

/// The stages that only `make soak` runs.
const SOAK_STAGES: &[&[TestStage]] = &[
    &[TestStage("upgrade", Selection::EndToEnd("upgrade"), &[])],
    &[TestStage("crowd", Selection::EndToEnd("crowd"), &[])],
];

/// Runs all stages, also after a failed one. Without test programs there is nothing more to run.
pub fn run(length: TestLength) -> Result<()> {
    let mut results = Vec::new();
    let programs = packages::prepare_while(|| {
        if length == TestLength::Short {
            results.push(build_stage("format", || run_command(&mut cargo(&["fmt", "--all", "--check"]))));
        }
        let mut programs = Vec::new();
        results.push(build_stage("build", || {
            programs = test_program::build_all()?;
            check_all_selected(&programs)
        }));
        Ok(programs)
    })?;
    if !programs.is_empty() {
        let (tests, builds) = thread::scope(|scope| {
            let builds = scope.spawn(|| run_builds(length));
            let tests = run_groups(length, STAGES_BESIDE_BUILDS, &programs);
            (tests, builds.join().map_err(|_| anyhow!("the thread of the builds panicked")))
        });
        results.extend(builds?);
        results.extend(tests?);
        results.extend(run_groups(length, STAGES_ALONE, &programs)?);
        if length == TestLength::Long {
            results.extend(run_groups(length, SOAK_STAGES, &programs)?);
        }
    }
    print_summary(&results)
}

/// The builds that the first tests do not need, at a low priority: tests run at the same time.
fn run_builds(length: TestLength) -> Vec<StageResult> {
    let mut results = Vec::new();
    if length == TestLength::Short {
        let clippy = ["clippy", "--locked", "--workspace", "--all-targets", "--", "-D", "warnings"];
        results.push(build_stage("clippy", || run_command(&mut low_priority_cargo(&clippy))));
    }
    results.push(build_stage("image", || image::build().map(drop)));
    results
}

/// Runs a stage without tests.
fn build_stage(name: &'static str, action: impl FnOnce() -> Result<()>) -> StageResult {
    print_progress(format!("stage {name}"));
    let start = Instant::now();
    let outcome = action();
    if let Err(e) = &outcome {
        print_progress(format!("{name}: {e:#}"));
    }
    StageResult { name, passed: outcome.is_ok(), tests: None, seconds: start.elapsed().as_secs_f64() }
}

impl TestStage {
    fn selects(&self, program: &TestProgram) -> bool {
        let TestProgram { package, target, kind, .. } = program;
        match self.1 {
            Selection::Unit => *kind == TargetKind::LibraryOrBinary,
            Selection::Doc => false,
            Selection::Package(directory) => *kind == TargetKind::Test && package == directory,
            Selection::Rest => {
                *kind == TargetKind::Test && !["crates/patchbay", "tests"].contains(&package.as_str())
            }
            Selection::EndToEnd(name) => *kind == TargetKind::Test && package == "tests" && target == name,
        }
    }

    fn commands(&self, programs: &[TestProgram]) -> Vec<Command> {
        let mut commands: Vec<Command> = match self.1 {
            Selection::Doc => vec![cargo(&["test", "--locked", "--workspace", "--doc"])],
            _ => programs.iter().filter(|program| self.selects(program)).map(TestProgram::command).collect(),
        };
        for command in &mut commands {
            command.args(self.2);
        }
        commands
    }

    fn run(&self, length: TestLength, programs: &[TestProgram], prefix: &str) -> Result<StageResult> {
        let name = self.0;
        print_progress(format!("stage {name}"));
        let start = Instant::now();
        let (mut passed, mut tests) = (true, TestResults::default());
        for mut command in self.commands(programs) {
            command.env("PATCHBAY_LAB_STATE", lab_state_dir());
            if length == TestLength::Long {
                command.env("PATCHBAY_SOAK", "1");
            }
            let (ok, results) = run_tests(&mut command, prefix)?;
            if !ok {
                print_progress(format!("{name}: {command:?} failed"));
            }
            passed &= ok;
            tests.add(results);
        }
        Ok(StageResult { name, passed, tests: Some(tests), seconds: start.elapsed().as_secs_f64() })
    }
}

/// The directory of all labs of this checkout, so that a run in another checkout does not take them down.
fn lab_state_dir() -> OsString {
    env::var_os("PATCHBAY_LAB_STATE").unwrap_or_else(|| {
        let mut hasher = DefaultHasher::new();
        e2e::repository().canonicalize().unwrap_or_default().hash(&mut hasher);
        format!("/var/lib/patchbay-lab-{:016x}", hasher.finish()).into()
    })
}

/// Fails if no stage runs one of the programs.
fn check_all_selected(programs: &[TestProgram]) -> Result<()> {
    let stages =
        || [STAGES_BESIDE_BUILDS, STAGES_ALONE, SOAK_STAGES].into_iter().flatten().copied().flatten();
    let unselected = |program: &&TestProgram| !stages().any(|stage| stage.selects(program));
    match programs.iter().find(unselected) {
        Some(program) => bail!("no stage runs the tests of {program:?}"),
        None => Ok(()),
    }
}

fn run_groups(
    length: TestLength,
    groups: &[&[TestStage]],
    programs: &[TestProgram],
) -> Result<Vec<StageResult>> {
    let mut results = Vec::new();
    for group in groups {
        results.extend(run_parallel(length, group, programs)?);
    }
    Ok(results)
}

fn run_parallel(
    length: TestLength,
    stages: &[TestStage],
    programs: &[TestProgram],
) -> Result<Vec<StageResult>> {
    let prefix = |stage: &TestStage| if stages.len() > 1 { format!("{}: ", stage.0) } else { String::new() };
    thread::scope(|scope| {
        let start = |stage| scope.spawn(move || TestStage::run(stage, length, programs, &prefix(stage)));
        let running: Vec<_> = stages.iter().map(start).collect();
        let join = |stage: thread::ScopedJoinHandle<'_, _>| {
            stage.join().unwrap_or_else(|_| bail!("the thread of a stage panicked"))
        };
        running.into_iter().map(join).collect()
    })
}

fn print_summary(results: &[StageResult]) -> Result<()> {
    let mut text = String::from("\nstage           result   passed  failed   time\n");
    let (mut all_passed, mut all_failed) = (0, 0);
    for stage in results {
        let (passed, failed) = match &stage.tests {
            Some(tests) => {
                all_passed += tests.passed;
                all_failed += tests.failed;
                (tests.passed.to_string(), tests.failed.to_string())
            }
            None => ("-".into(), "-".into()),
        };
        let result = if stage.passed { "ok" } else { "FAILED" };
        let _ = writeln!(
            text,
            "{:<15} {result:<8} {passed:>6}  {failed:>6}  {:>4.0} s",
            stage.name, stage.seconds
        );
    }
    for stage in results {
        for failure in stage.tests.iter().flat_map(|tests| &tests.failures) {
            let _ = write!(text, "\n{}: {failure}\n", stage.name);
        }
    }
    println!("{text}\n{all_passed} passed, {all_failed} failed");
    let failed: Vec<&str> = results.iter().filter(|s| !s.passed).map(|s| s.name).collect();
    let empty: Vec<&str> = results
        .iter()
        .filter(|s| s.tests.as_ref().is_some_and(|tests| tests.passed + tests.failed == 0))
        .map(|s| s.name)
        .collect();
    if !failed.is_empty() {
        bail!("failed: {}", failed.join(", "));
    }
    if !empty.is_empty() {
        bail!("ran no test: {}", empty.join(", "));
    }
    Ok(())
}
