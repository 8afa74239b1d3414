//! Shares equal texts and labels of pods, services and slices, of which a cluster has many.

use std::{collections::HashSet, hash::Hash, sync::Arc};

use api::selection::NadRef;
use plan::services::{
    ContainerPort, Endpoint, Labels, ObservedEndpoint, ObservedSlice, PodFacts, PodInterface,
};

/// The set is pruned when it has grown by this factor since the last time.
const GROWTH: usize = 2;
const MIN_SIZE: usize = 1024;

/// Equal values, each stored once for as long as it is used.
struct SharedSet<T: ?Sized> {
    values: HashSet<Arc<T>>,
    /// The size at which values that are no longer used are removed.
    prune_at: usize,
}

impl<T: ?Sized + Eq + Hash> SharedSet<T> {
    fn new() -> Self {
        Self { values: HashSet::new(), prune_at: MIN_SIZE }
    }

    fn share(&mut self, value: Arc<T>) -> Arc<T> {
        if let Some(shared) = self.values.get(&value) {
            return Arc::clone(shared);
        }
        if self.values.len() >= self.prune_at {
            self.values.retain(|value| Arc::strong_count(value) > 1);
            self.prune_at = (self.values.len() * GROWTH).max(MIN_SIZE);
        }
        self.values.insert(Arc::clone(&value));
        value
    }
}

/// Equal texts, labels and ports of all objects.
pub struct Interner {
    texts: SharedSet<str>,
    labels: SharedSet<Labels>,
    ports: SharedSet<[ContainerPort]>,
    nads: SharedSet<NadRef>,
}

impl Default for Interner {
    fn default() -> Self {
        Self {
            texts: SharedSet::new(),
            labels: SharedSet::new(),
            ports: SharedSet::new(),
            nads: SharedSet::new(),
        }
    }
}

impl Interner {
    pub fn text(&mut self, text: Arc<str>) -> Arc<str> {
        self.texts.share(text)
    }

    fn optional(&mut self, text: Option<Arc<str>>) -> Option<Arc<str>> {
        text.map(|text| self.texts.share(text))
    }

    pub fn pod(&mut self, pod: PodFacts) -> PodFacts {
        let interfaces = pod.interfaces.map(|all| {
            let shared = all.into_vec().into_iter().map(|interface| PodInterface {
                nad: self.nads.share(interface.nad),
                interface: self.texts.share(interface.interface),
                ..interface
            });
            shared.collect()
        });
        PodFacts {
            namespace: self.texts.share(pod.namespace),
            name: self.texts.share(pod.name),
            uid: self.texts.share(pod.uid),
            labels: self.labels.share(pod.labels),
            node: self.optional(pod.node),
            hostname: self.optional(pod.hostname),
            subdomain: self.optional(pod.subdomain),
            ports: self.ports.share(pod.ports),
            interfaces,
            ..pod
        }
    }

    pub fn slice(&mut self, slice: ObservedSlice) -> ObservedSlice {
        let endpoints = slice.endpoints.into_iter().map(|endpoint| match endpoint {
            ObservedEndpoint::Known(endpoint) => ObservedEndpoint::Known(self.endpoint(endpoint)),
            ObservedEndpoint::Altered => ObservedEndpoint::Altered,
        });
        let mut endpoints: Vec<ObservedEndpoint> = endpoints.collect();
        endpoints.shrink_to_fit();
        ObservedSlice {
            endpoints,
            labels: self.labels.share(slice.labels),
            network: self.optional(slice.network),
            owner: self.optional(slice.owner),
            ..slice
        }
    }

    fn endpoint(&mut self, endpoint: Endpoint) -> Endpoint {
        Endpoint {
            hostname: self.optional(endpoint.hostname),
            pod: self.texts.share(endpoint.pod),
            pod_uid: self.texts.share(endpoint.pod_uid),
            node: self.optional(endpoint.node),
            zone: self.optional(endpoint.zone),
            ..endpoint
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_texts_are_stored_once_and_forgotten_when_unused() {
        let mut interner = Interner::default();
        let one = interner.text("a".into());
        assert!(Arc::ptr_eq(&one, &interner.text("a".into())));
        let kept = interner.text("kept".into());
        drop(one);
        for number in 0..MIN_SIZE * 4 {
            interner.text(number.to_string().into());
        }
        assert!(interner.texts.values.len() <= MIN_SIZE + 1, "{}", interner.texts.values.len());
        assert!(Arc::ptr_eq(&kept, &interner.text("kept".into())));
    }
}
