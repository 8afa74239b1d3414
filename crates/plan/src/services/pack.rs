//! The distribution of endpoints over slices, with the rules of the built-in controller (R18-R21, R30).

use std::{cmp::Reverse, collections::HashMap, sync::Arc};

use jiff::Timestamp;

use super::{
    DesiredEndpoints, EndpointGroup, EndpointPorts, Family, Labels, MAX_ENDPOINTS, ObservedEndpoint,
    ObservedSlice, SliceContent, SliceOwner, SliceTarget, SliceUpdate,
};

/// What the slices of a service depend on, besides its endpoints.
#[derive(Debug, Clone, Copy)]
pub struct PackInput<'a> {
    pub owner: &'a SliceOwner,
    /// The slices with the name of the Service that Patchbay manages.
    pub observed: &'a [&'a ObservedSlice],
    /// The maximum number of endpoints of a slice, at least 1: [`MAX_ENDPOINTS`].
    pub max: usize,
    /// When the last plan was made that this process applied. A change of readiness before that caused no new endpoint (R33).
    pub last_planned: Option<Timestamp>,
}

/// The slices that change. They are applied in this order: creates, updates, deletes (R21).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SlicePlan {
    pub creates: Vec<SliceContent>,
    pub updates: Vec<SliceUpdate>,
    pub deletes: Vec<SliceTarget>,
}

impl SlicePlan {
    pub fn is_empty(&self) -> bool {
        self.creates.is_empty() && self.updates.is_empty() && self.deletes.is_empty()
    }

    /// The number of writes.
    pub fn len(&self) -> usize {
        self.creates.len() + self.updates.len() + self.deletes.len()
    }
}

/// Deletes all slices of a Service that gets none.
pub fn withdraw<'a>(observed: impl IntoIterator<Item = &'a ObservedSlice>) -> SlicePlan {
    let present = observed.into_iter().filter(|slice| !slice.deleting);
    SlicePlan { deletes: present.map(ObservedSlice::target).collect(), ..SlicePlan::default() }
}

/// Plans the slices of a Service.
///
/// An endpoint stays in its slice. Slices that must be written anyway are filled first, then one other slice, and only then
/// a new one is created. A slice whose endpoints stay as they are is not written, however empty it is.
pub fn pack(desired: &DesiredEndpoints, input: &PackInput<'_>) -> SlicePlan {
    let owner = input.owner;
    let mut packer = Packer {
        input,
        desired,
        max: input.max.clamp(1, 1000),
        labels: Arc::new(owner.slice_labels()),
        plan: SlicePlan::default(),
    };
    let mut by_family: [Vec<&ObservedSlice>; 2] = [Vec::new(), Vec::new()];
    for slice in input.observed.iter().filter(|slice| !slice.deleting) {
        match slice.family.filter(|family| owner.families.contains(*family)) {
            // A Service that was created again under the same name has another UID (R3).
            Some(family) if slice.owner.as_ref().is_none_or(|uid| *uid == owner.uid) => {
                by_family[usize::from(family == Family::Ipv6)].push(slice);
            }
            _ => packer.plan.deletes.push(slice.target()),
        }
    }
    for (family, mut slices) in Family::ALL.into_iter().zip(by_family) {
        if owner.families.contains(family) {
            slices.sort_unstable_by(|a, b| a.name.cmp(&b.name));
            packer.pack_family(family, &slices);
        }
    }
    packer.plan
}

struct Packer<'a> {
    input: &'a PackInput<'a>,
    desired: &'a DesiredEndpoints,
    max: usize,
    labels: Arc<Labels>,
    plan: SlicePlan,
}

/// A slice that stays or is created, with the indexes of its endpoints in the group.
struct Filled<'a> {
    slice: Option<&'a ObservedSlice>,
    endpoints: Vec<usize>,
}

/// What happens to an endpoint of a group.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Placement {
    /// It is in no slice.
    None,
    /// It is in the slice with this index.
    Same(usize),
    /// It is in the slice with this index, and differs there, but not in the readiness of its pod.
    Changed(usize),
    /// It is in the slice with this index, with another readiness of its pod.
    ReadinessChanged(usize),
}

impl<'a> Packer<'a> {
    fn pack_family(&mut self, family: Family, slices: &[&'a ObservedSlice]) {
        let desired = self.desired;
        let groups = || desired.groups.iter().enumerate().filter(|(_, group)| group.family == family);
        let (mut kept, mut creates) = (0, Vec::new());
        let mut unused: Vec<&ObservedSlice> = Vec::new();
        let mut of_group: Vec<Vec<&ObservedSlice>> = vec![Vec::new(); desired.groups.len()];
        let by_ports: HashMap<&EndpointPorts, usize> =
            groups().map(|(index, group)| (&group.ports, index)).collect();
        for &slice in slices {
            match slice.ports.as_ref().and_then(|ports| by_ports.get(ports)) {
                Some(&index) => of_group[index].push(slice),
                None => unused.push(slice),
            }
        }
        for (index, group) in groups() {
            kept += self.pack_group(index, group, &of_group[index], &mut unused, &mut creates);
        }
        if kept == 0 && creates.is_empty() {
            // R19: the family keeps one empty slice.
            if let Some(index) = unused.iter().position(|slice| self.is_placeholder(slice)) {
                unused.remove(index);
            } else {
                // The first slice of a Service is caused by its creation (R33).
                let trigger_time = self.input.observed.is_empty().then_some(self.input.owner.created);
                creates.push(self.content(family, EndpointPorts::default(), Vec::new(), trigger_time));
            }
        }
        // A delete and a create become an update (R20).
        let mut unused = unused.into_iter();
        for content in creates {
            match unused.next() {
                Some(slice) => self.plan.updates.push(SliceUpdate { target: slice.target(), content }),
                None if self.input.owner.deleting => {}
                None => self.plan.creates.push(content),
            }
        }
        self.plan.deletes.extend(unused.map(ObservedSlice::target));
    }

    /// Distributes the endpoints of a group. Returns the number of slices that stay.
    fn pack_group(
        &mut self,
        index: usize,
        group: &EndpointGroup,
        slices: &[&'a ObservedSlice],
        unused: &mut Vec<&'a ObservedSlice>,
        creates: &mut Vec<SliceContent>,
    ) -> usize {
        let mut placements = vec![Placement::None; group.endpoints.len()];
        let mut sizes = vec![0_usize; slices.len()];
        let mut written: Vec<bool> = slices.iter().map(|slice| self.metadata_differs(slice)).collect();
        for (at, slice) in slices.iter().enumerate() {
            for observed in &slice.endpoints {
                let place = match observed {
                    ObservedEndpoint::Known(endpoint) => self.desired.index_of(endpoint.address),
                    ObservedEndpoint::Altered => None,
                };
                let place = place.filter(|place| place.group == index).map(|place| place.endpoint);
                // An endpoint that an earlier slice has is dropped, so that doubled slices become one.
                match place.filter(|&endpoint| placements[endpoint] == Placement::None) {
                    Some(endpoint) => {
                        sizes[at] += 1;
                        let same = *observed == group.endpoints[endpoint];
                        written[at] |= !same;
                        placements[endpoint] = match observed {
                            _ if same => Placement::Same(at),
                            ObservedEndpoint::Known(known)
                                if known.conditions.serving
                                    != group.endpoints[endpoint].conditions.serving =>
                            {
                                Placement::ReadinessChanged(at)
                            }
                            _ => Placement::Changed(at),
                        };
                    }
                    None => written[at] = true,
                }
            }
        }
        let mut filled: Vec<Filled<'a>> = Vec::new();
        let mut rest: Vec<usize> = Vec::new();
        let mut filled_index: Vec<Option<usize>> = vec![None; slices.len()];
        for at in (0..slices.len()).filter(|&at| written[at] && sizes[at] > 0) {
            filled_index[at] = Some(filled.len());
            filled.push(Filled { slice: Some(slices[at]), endpoints: Vec::with_capacity(self.max) });
        }
        for (endpoint, placement) in placements.iter().enumerate() {
            match placement {
                Placement::None => rest.push(endpoint),
                Placement::Same(at) | Placement::Changed(at) | Placement::ReadinessChanged(at) => {
                    if let Some(index) = filled_index[*at] {
                        filled[index].endpoints.push(endpoint);
                    }
                }
            }
        }
        // From here on the next endpoint is the last of the list.
        rest.reverse();
        filled.sort_by_key(|one| Reverse(one.endpoints.len()));
        for one in &mut filled {
            take(&mut one.endpoints, &mut rest, self.max);
        }
        let mut unchanged: Vec<usize> =
            (0..slices.len()).filter(|&at| !written[at] && sizes[at] > 0).collect();
        while !rest.is_empty() {
            let fits = |at: &&usize| sizes[**at] + rest.len() <= self.max && rest.len() < self.max;
            let best = unchanged.iter().filter(fits).max_by_key(|at| (sizes[**at], Reverse(**at))).copied();
            let mut one = Filled { slice: None, endpoints: Vec::new() };
            if let Some(at) = best {
                unchanged.retain(|&one| one != at);
                one.slice = Some(slices[at]);
                let here = |placement: &Placement| *placement == Placement::Same(at);
                one.endpoints =
                    (0..placements.len()).filter(|&endpoint| here(&placements[endpoint])).collect();
            }
            take(&mut one.endpoints, &mut rest, self.max);
            filled.push(one);
        }
        let kept = filled.iter().filter(|one| one.slice.is_some()).count() + unchanged.len();
        for one in filled {
            let trigger_time = self.trigger_time(group, &one.endpoints, &placements);
            let endpoints = one.endpoints.iter().map(|&endpoint| group.endpoints[endpoint].clone()).collect();
            let content = self.content(group.family, group.ports.clone(), endpoints, trigger_time);
            match one.slice {
                Some(slice) => self.plan.updates.push(SliceUpdate { target: slice.target(), content }),
                None => creates.push(content),
            }
        }
        unused.extend((0..slices.len()).filter(|&at| sizes[at] == 0).map(|at| slices[at]));
        kept
    }

    /// The earliest change of readiness that caused this write (R33). An endpoint cannot be older than its Service.
    fn trigger_time(
        &self,
        group: &EndpointGroup,
        endpoints: &[usize],
        placements: &[Placement],
    ) -> Option<Timestamp> {
        // Kubernetes stores whole seconds, and the watch may deliver a change in the second after it.
        let is_new = |time: Timestamp| {
            self.input.last_planned.is_none_or(|planned| time.as_second() + 1 >= planned.as_second())
        };
        let caused = |endpoint: &usize| {
            let time = group.ready_since[*endpoint]?.max(self.input.owner.created);
            let caused = match placements[*endpoint] {
                Placement::Same(_) => false,
                Placement::ReadinessChanged(_) => true,
                Placement::None | Placement::Changed(_) => is_new(time),
            };
            caused.then_some(time)
        };
        endpoints.iter().filter_map(caused).min()
    }

    fn metadata_differs(&self, slice: &ObservedSlice) -> bool {
        slice.owner.is_none()
            || slice.network.as_deref() != Some(&*self.input.owner.network)
            || slice.labels != self.labels
    }

    fn is_placeholder(&self, slice: &ObservedSlice) -> bool {
        slice.endpoints.is_empty()
            && slice.ports.as_ref().is_some_and(EndpointPorts::is_empty)
            && !self.metadata_differs(slice)
    }

    fn content(
        &self,
        family: Family,
        ports: EndpointPorts,
        endpoints: Vec<super::Endpoint>,
        trigger_time: Option<Timestamp>,
    ) -> SliceContent {
        let network = self.input.owner.network.clone();
        SliceContent { family, labels: self.labels.clone(), network, trigger_time, ports, endpoints }
    }
}

/// Moves endpoints from the end of the rest into a slice until it is full.
fn take(slice: &mut Vec<usize>, rest: &mut Vec<usize>, max: usize) {
    let count = max.saturating_sub(slice.len()).min(rest.len());
    slice.extend(rest.drain(rest.len() - count..).rev());
}

impl PartialEq<super::Endpoint> for ObservedEndpoint {
    fn eq(&self, other: &super::Endpoint) -> bool {
        matches!(self, Self::Known(endpoint) if endpoint == other)
    }
}

impl<'a> PackInput<'a> {
    /// The input of a plan with the default size of slices.
    pub fn new(owner: &'a SliceOwner, observed: &'a [&'a ObservedSlice]) -> Self {
        Self { owner, observed, max: MAX_ENDPOINTS, last_planned: None }
    }
}
