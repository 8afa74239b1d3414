//! What keeps the daemon from being ready.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// A part of the daemon that must be well.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    Kernel,
    NodeWatch,
    Node,
    OwnWatch,
    Publish,
}

/// The problems of each part. Ready means none.
#[derive(Debug)]
pub struct Health(Mutex<BTreeMap<Part, String>>);

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
            (Part::OwnWatch, "the NodeNetwork has not been read yet"),
            (Part::Publish, "the NodeNetwork has not been published yet"),
        ];
        Self(Mutex::new(problems.map(|(part, text)| (part, text.to_owned())).into()))
    }

    /// This part is well.
    pub fn well(&self, part: Part) -> News {
        if self.problems().remove(&part).is_some() { News::Changed } else { News::Same }
    }

    /// This part is not well, because of `problem`.
    pub fn ill(&self, part: Part, problem: String) -> News {
        let mut problems = self.problems();
        if problems.get(&part) == Some(&problem) {
            return News::Same;
        }
        problems.insert(part, problem);
        News::Changed
    }

    /// Why the daemon is not ready; none if it is.
    pub fn problem(&self) -> Option<String> {
        let problems = self.problems();
        let all: Vec<&str> = problems.values().map(String::as_str).collect();
        (!all.is_empty()).then(|| all.join("; "))
    }

    fn problems(&self) -> MutexGuard<'_, BTreeMap<Part, String>> {
        // A map of texts is as good after a panic as before.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_means_that_every_part_is_well() {
        let health = Health::new();
        for part in [Part::Kernel, Part::NodeWatch, Part::OwnWatch] {
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
}
