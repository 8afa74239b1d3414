//! R22, R23: the conditions of an endpoint by the state of its pod.

use super::fixtures::{desired, pod, spec};
use crate::services::{EndpointConditions, PodPhase};

/// Phase, Ready, deletion and publishNotReadyAddresses; then ready, serving and terminating of the endpoint, if it exists.
type Row = (PodPhase, bool, bool, bool, Option<(bool, bool, bool)>);

const TABLE: [Row; 12] = [
    (PodPhase::Active, true, false, false, Some((true, true, false))),
    (PodPhase::Active, true, false, true, Some((true, true, false))),
    (PodPhase::Active, false, false, false, Some((false, false, false))),
    (PodPhase::Active, false, false, true, Some((true, false, false))),
    (PodPhase::Active, true, true, false, Some((false, true, true))),
    (PodPhase::Active, true, true, true, Some((true, true, true))),
    (PodPhase::Active, false, true, false, Some((false, false, true))),
    (PodPhase::Active, false, true, true, Some((true, false, true))),
    (PodPhase::Finished, true, false, false, None),
    (PodPhase::Finished, false, false, false, None),
    (PodPhase::Finished, false, true, false, None),
    (PodPhase::Finished, false, false, true, None),
];

#[test]
fn r22_r23_conditions_follow_readiness_deletion_and_phase() {
    for (phase, ready, deleting, publish_not_ready, expected) in TABLE {
        let mut service = spec();
        service.publish_not_ready = publish_not_ready;
        let mut server = pod("server", &["10.1.0.1"]);
        (server.phase, server.ready, server.deleting) = (phase, ready, deleting);
        let desired = desired(&service, [&server]);
        let conditions = desired.groups.first().map(|group| group.endpoints[0].conditions);
        let expected =
            expected.map(|(ready, serving, terminating)| EndpointConditions { ready, serving, terminating });
        assert_eq!(conditions, expected, "{phase:?} {ready} {deleting} {publish_not_ready}");
        let ready = expected.is_some_and(|conditions| conditions.ready);
        assert_eq!(desired.counts.ipv4.ready, i32::from(ready));
        assert_eq!(desired.counts.ipv4.total, i32::from(expected.is_some()));
        assert_eq!(desired.pods, usize::from(phase == PodPhase::Active));
    }
}
