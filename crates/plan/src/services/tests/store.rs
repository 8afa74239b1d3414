//! A simulated API server for EndpointSlices: it validates and stores what a plan writes.

use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
};

use crate::services::{
    DesiredEndpoints, Endpoint, MAX_ENDPOINTS, ObservedEndpoint, ObservedSlice, PackInput, SliceContent,
    SliceOwner, SlicePlan, SliceTarget, pack,
};

/// The slices of a cluster.
#[derive(Debug, Clone)]
pub struct Store {
    /// The maximum number of endpoints of a slice.
    pub max: usize,
    slices: BTreeMap<Arc<str>, ObservedSlice>,
    /// The last name, UID and resource version.
    counter: u32,
}

impl Default for Store {
    fn default() -> Self {
        Self::with_max(MAX_ENDPOINTS)
    }
}

impl Store {
    /// An empty store for slices of at most this many endpoints.
    pub fn with_max(max: usize) -> Self {
        Self { max, slices: BTreeMap::new(), counter: 0 }
    }

    pub fn slices(&self) -> Vec<&ObservedSlice> {
        self.slices.values().collect()
    }

    pub fn slice(&mut self, index: usize) -> &mut ObservedSlice {
        self.slices.values_mut().nth(index).unwrap()
    }

    /// The number of endpoints of each slice, in the order of their names.
    pub fn sizes(&self) -> Vec<usize> {
        self.slices.values().map(|slice| slice.endpoints.len()).collect()
    }

    /// Every endpoint of every slice. A slice that another client altered fails the test.
    pub fn union(&self) -> Vec<&Endpoint> {
        fn known(observed: &ObservedEndpoint) -> &Endpoint {
            match observed {
                ObservedEndpoint::Known(endpoint) => endpoint,
                ObservedEndpoint::Altered => panic!("a slice contains an altered endpoint"),
            }
        }
        let mut union: Vec<&Endpoint> =
            self.slices.values().flat_map(|slice| &slice.endpoints).map(known).collect();
        union.sort_unstable_by_key(|endpoint| (endpoint.address, endpoint.pod.clone()));
        union
    }

    pub fn plan(&self, desired: &DesiredEndpoints, owner: &SliceOwner) -> SlicePlan {
        pack(desired, &PackInput { max: self.max, ..PackInput::new(owner, &self.slices()) })
    }

    /// Plans, applies the plan, and checks that a second plan is empty. Returns the plan.
    pub fn converge(&mut self, desired: &DesiredEndpoints, owner: &SliceOwner) -> SlicePlan {
        let plan = self.plan(desired, owner);
        self.apply(&plan, owner);
        assert_eq!(self.plan(desired, owner), SlicePlan::default(), "a plan applied twice is empty");
        plan
    }

    pub fn apply(&mut self, plan: &SlicePlan, owner: &SliceOwner) {
        for content in &plan.creates {
            self.create(content, owner);
        }
        for update in &plan.updates {
            self.check(&update.target);
            let old = &self.slices[&update.target.name];
            assert_eq!(old.family, Some(update.content.family), "addressType is immutable");
            let (generation, uid) = (old.generation + 1, old.uid.clone());
            let name = update.target.name.clone();
            let slice = self.stored(name, uid, generation, &update.content, owner);
            self.slices.insert(slice.name.clone(), slice);
        }
        for target in &plan.deletes {
            self.check(target);
            self.slices.remove(&target.name);
        }
    }

    pub fn create(&mut self, content: &SliceContent, owner: &SliceOwner) {
        self.counter += 1;
        let name: Arc<str> = format!("{}{:05}", owner.generate_name(), self.counter).into();
        let uid = format!("slice-{}", self.counter).into();
        let slice = self.stored(name.clone(), uid, 1, content, owner);
        self.slices.insert(name, slice);
    }

    pub fn remove(&mut self, index: usize) {
        let name = self.slice(index).name.clone();
        self.slices.remove(&name);
    }

    /// A write of another client: the resource version moves.
    pub fn touch(&mut self, index: usize) {
        self.counter += 1;
        let version = self.counter.to_string().into();
        self.slice(index).resource_version = version;
    }

    /// A write with an old UID or resource version is a conflict.
    fn check(&self, target: &SliceTarget) {
        assert_eq!(self.slices.get(&target.name).map(ObservedSlice::target).as_ref(), Some(target));
    }

    /// The stored slice, after the validation of the API server.
    fn stored(
        &mut self,
        name: Arc<str>,
        uid: Arc<str>,
        generation: i64,
        content: &SliceContent,
        owner: &SliceOwner,
    ) -> ObservedSlice {
        assert!(content.endpoints.len() <= self.max, "R18: {} endpoints", content.endpoints.len());
        let mut keys = HashSet::new();
        for endpoint in &content.endpoints {
            assert_eq!(endpoint.address.is_ipv4(), content.family.as_str() == "IPv4", "R11: {endpoint:?}");
            assert!(keys.insert(endpoint.address), "an address is twice in a slice: {endpoint:?}");
        }
        self.counter += 1;
        ObservedSlice {
            name,
            uid,
            resource_version: self.counter.to_string().into(),
            generation,
            deleting: false,
            labels: content.labels.clone(),
            network: Some(content.network.clone()),
            owner: Some(owner.uid.clone()),
            family: Some(content.family),
            ports: Some(content.ports.clone()),
            endpoints: content.endpoints.iter().cloned().map(ObservedEndpoint::Known).collect(),
        }
    }
}
