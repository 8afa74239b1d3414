//! The Warning events of annotated Services.

use super::{
    DesiredEndpoints, ForeignObject, NetworkState, ServiceSpec, StatusEvent,
    status::{
        DUPLICATE_ADDRESS, FOREIGN_ENDPOINTS, NETWORK_NOT_FOUND, duplicates_message, foreign_message,
        missing_network,
    },
};

/// What a NetworkService would say in its conditions, about an annotated Service, which has none.
pub fn service_warnings(
    spec: &ServiceSpec,
    network: &NetworkState,
    desired: &DesiredEndpoints,
    foreign: &[ForeignObject],
) -> Vec<StatusEvent> {
    let missing = missing_network(&spec.network, network, "the annotation");
    let missing = missing.map(|note| StatusEvent { reason: NETWORK_NOT_FOUND, note });
    let duplicates = desired.duplicates.chunks(1);
    let duplicates =
        duplicates.map(|one| StatusEvent { reason: DUPLICATE_ADDRESS, note: duplicates_message(one) });
    let foreign = (!foreign.is_empty()).then(|| {
        let note = foreign_message(foreign, &format!("svc/{}", spec.name));
        StatusEvent { reason: FOREIGN_ENDPOINTS, note }
    });
    missing.into_iter().chain(duplicates).chain(foreign).collect()
}
