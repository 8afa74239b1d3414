//! What keeps the daemon from being ready, and whether its loop still turns.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// How long a turn of the loop may take. The calls of one turn have deadlines that are shorter together.
const LONGEST_TURN: Duration = Duration::from_secs(60);

/// A part of the daemon that must be well.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    Kernel,
    NodeWatch,
    Node,
    NetworkWatch,
    NodesWatch,
    Publish,
    Plugin,
}

/// The problems of each part, and the last turn of the loop. Ready means no problem.
#[derive(Debug)]
pub struct Health(Mutex<State>);

#[derive(Debug)]
struct State {
    problems: BTreeMap<Part, String>,
    turned: Instant,
}

/// Whether saying so was news.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum News {
    Changed,
    Same,
}

impl Health {
    /// A daemon that has only just started.
    pub fn new() -> Self {
        let problems = [
            (Part::Kernel, "the links of this node have not been read yet"),
            (Part::NodeWatch, "the Node has not been read yet"),
            (Part::NetworkWatch, "the BridgeNetworks have not been read yet"),
            (Part::NodesWatch, "the NodeNetworks have not been read yet"),
            (Part::Publish, "the NodeNetwork has not been published yet"),
        ];
        let problems = problems.map(|(part, text)| (part, text.to_owned())).into();
        Self(Mutex::new(State { problems, turned: Instant::now() }))
    }

    /// This part is well.
    pub fn well(&self, part: Part) -> News {
        if self.state().problems.remove(&part).is_some() { News::Changed } else { News::Same }
    }

    /// This part is not well, because of `problem`.
    pub fn ill(&self, part: Part, problem: String) -> News {
        let problems = &mut self.state().problems;
        if problems.get(&part) == Some(&problem) {
            return News::Same;
        }
        problems.insert(part, problem);
        News::Changed
    }

    /// The loop has come this far.
    pub fn turned(&self) {
        self.state().turned = Instant::now();
    }

    /// Why the daemon is not ready; none if it is.
    pub fn problem(&self) -> Option<String> {
        let state = self.state();
        let all: Vec<&str> = state.problems.values().map(String::as_str).collect();
        (!all.is_empty()).then(|| all.join("; "))
    }

    /// Why only a restart can help; none if the loop turns.
    pub fn hang(&self) -> Option<String> {
        let since = self.state().turned.elapsed();
        (since >= LONGEST_TURN).then(|| format!("the loop has stood still for {} s", since.as_secs()))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Texts and a time are as good after a panic as before.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[test]
    fn ready_means_that_every_part_is_well() {
        let health = Health::new();
        for part in [Part::Kernel, Part::NodeWatch, Part::NetworkWatch, Part::NodesWatch] {
            assert_eq!(health.well(part), News::Changed);
        }
        assert_eq!(health.problem().unwrap(), "the NodeNetwork has not been published yet");
        health.well(Part::Publish);
        assert_eq!(health.problem(), None);
    }

    #[test]
    fn the_same_problem_is_news_once() {
        let health = Health::new();
        assert_eq!(health.ill(Part::Node, "gone".into()), News::Changed);
        assert_eq!(health.ill(Part::Node, "gone".into()), News::Same);
        assert_eq!(health.well(Part::Node), News::Changed);
        assert_eq!(health.well(Part::Node), News::Same);
    }

    #[tokio::test(start_paused = true)]
    async fn a_loop_that_stands_still_for_a_minute_hangs() {
        let health = Health::new();
        advance(Duration::from_secs(59)).await;
        assert_eq!(health.hang(), None);
        health.turned();
        advance(Duration::from_secs(61)).await;
        assert_eq!(health.hang().unwrap(), "the loop has stood still for 61 s");
        health.turned();
        assert_eq!(health.hang(), None);
    }
}
