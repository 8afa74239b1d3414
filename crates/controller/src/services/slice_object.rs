//! EndpointSlices as they are sent to the API server.

use std::collections::BTreeMap;

use api::networkservice::{SERVICE_NETWORK_ANNOTATION, TRIGGER_TIME_ANNOTATION};
use k8s_openapi::{
    api::{
        core::v1::ObjectReference,
        discovery::v1::{
            Endpoint as EndpointObject, EndpointConditions, EndpointHints, EndpointPort, EndpointSlice,
            ForNode, ForZone,
        },
    },
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference},
};
use plan::services::{Endpoint, Hints, SliceContent, SliceOwner, SliceTarget};

/// The object of a slice. With a target it replaces that very slice, otherwise it is new.
pub fn slice_object(
    namespace: &str,
    owner: &SliceOwner,
    content: &SliceContent,
    target: Option<&SliceTarget>,
) -> EndpointSlice {
    let mut annotations =
        BTreeMap::from([(SERVICE_NETWORK_ANNOTATION.to_owned(), content.network.to_string())]);
    if let Some(time) = content.trigger_time {
        annotations.insert(TRIGGER_TIME_ANNOTATION.to_owned(), time.to_string());
    }
    let labels = content.labels.iter().map(|(key, value)| (key.to_owned(), value.to_owned()));
    let metadata = ObjectMeta {
        name: target.map(|target| target.name.to_string()),
        uid: target.map(|target| target.uid.to_string()),
        resource_version: target.map(|target| target.resource_version.to_string()),
        generate_name: Some(owner.generate_name()),
        namespace: Some(namespace.to_owned()),
        labels: Some(labels.collect()),
        annotations: Some(annotations),
        owner_references: Some(vec![OwnerReference {
            api_version: "v1".to_owned(),
            kind: "Service".to_owned(),
            name: owner.service.to_string(),
            uid: owner.uid.to_string(),
            controller: Some(true),
            block_owner_deletion: Some(true),
        }]),
        ..ObjectMeta::default()
    };
    let ports = content.ports.as_slice().iter().map(|port| EndpointPort {
        name: Some(port.name.to_string()),
        protocol: Some(port.protocol.as_str().to_owned()),
        port: Some(i32::from(port.port)),
        app_protocol: port.app_protocol.as_deref().map(str::to_owned),
    });
    EndpointSlice {
        address_type: content.family.as_str().to_owned(),
        endpoints: content.endpoints.iter().map(|one| endpoint_object(namespace, one)).collect(),
        ports: Some(ports.collect()),
        metadata,
    }
}

fn endpoint_object(namespace: &str, endpoint: &Endpoint) -> EndpointObject {
    let Endpoint { address, hostname, pod, pod_uid, node, zone, conditions, hints } = endpoint;
    let text = |text: &std::sync::Arc<str>| text.to_string();
    EndpointObject {
        addresses: vec![address.to_string()],
        conditions: Some(EndpointConditions {
            ready: Some(conditions.ready),
            serving: Some(conditions.serving),
            terminating: Some(conditions.terminating),
        }),
        deprecated_topology: None,
        hints: hints_object(*hints, node.as_deref(), zone.as_deref()),
        hostname: hostname.as_ref().map(text),
        node_name: node.as_ref().map(text),
        target_ref: Some(ObjectReference {
            kind: Some("Pod".to_owned()),
            namespace: Some(namespace.to_owned()),
            name: Some(pod.to_string()),
            uid: Some(pod_uid.to_string()),
            ..ObjectReference::default()
        }),
        zone: zone.as_ref().map(text),
    }
}

fn hints_object(hints: Hints, node: Option<&str>, zone: Option<&str>) -> Option<EndpointHints> {
    let for_zones = zone.map(|zone| vec![ForZone { name: zone.to_owned() }]);
    match hints {
        Hints::None => None,
        Hints::Zone => Some(EndpointHints { for_zones, for_nodes: None }),
        Hints::Node => {
            let for_nodes = node.map(|node| vec![ForNode { name: node.to_owned() }]);
            Some(EndpointHints { for_zones, for_nodes })
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use api::{
        LabelSelector, NetworkServiceSpec,
        networkservice::{Hostnames, NetworkServicePort},
    };
    use plan::services::{
        EndpointInput, Families, Labels, NetworkState, NodeZones, ObservedSlice, PackInput, PodFacts,
        PodPhase, ServiceSpec, SlicePlan, TrafficDistribution, endpoints, interfaces, pack,
    };
    use serde_json::{Value, json};

    use super::*;
    use crate::cache::services::project;

    fn spec(traffic: Option<TrafficDistribution>) -> ServiceSpec {
        let port = json!({"name": "pg", "port": 5432, "appProtocol": "postgres"});
        let port: NetworkServicePort = serde_json::from_value(port).unwrap();
        let spec = NetworkServiceSpec {
            ports: vec![port],
            hostnames: Hostnames::PodName,
            ..serde_json::from_value(json!({"network": "blue", "selector": {"app": "db"}})).unwrap()
        };
        ServiceSpec {
            selector: LabelSelector::default(),
            traffic,
            ..ServiceSpec::from_network_service("ns", "db", &spec).unwrap()
        }
    }

    fn pod(name: &str, node: &str, addresses: &[&str]) -> PodFacts {
        let status = json!([{"name": "ns/blue", "interface": "net1", "ips": addresses}]).to_string();
        PodFacts {
            namespace: "ns".into(),
            name: name.into(),
            uid: format!("uid-{name}").into(),
            labels: Arc::new(Labels::new([("app", "db")])),
            node: Some(node.into()),
            phase: PodPhase::Active,
            deleting: false,
            ready: name != "unready",
            ready_since: None,
            created: jiff::Timestamp::UNIX_EPOCH,
            hostname: None,
            subdomain: None,
            host_network: false,
            ports: Arc::new([]),
            interfaces: interfaces(Some(&status), "ns"),
        }
    }

    fn owner(spec: &ServiceSpec) -> SliceOwner {
        SliceOwner {
            service: "db".into(),
            uid: "service-db".into(),
            created: jiff::Timestamp::UNIX_EPOCH,
            deleting: false,
            headless: true,
            families: Families::DUAL,
            labels: BTreeMap::from([("team".to_owned(), "storage".to_owned())]),
            network: spec.network.to_string().into(),
        }
    }

    fn plan(spec: &ServiceSpec, observed: &[&ObservedSlice]) -> SlicePlan {
        let zones = [("node-a", Some("zone-1")), ("node-b", None)];
        let nodes: NodeZones =
            zones.into_iter().map(|(node, zone)| (node.into(), zone.map(Into::into))).collect();
        let pods = [
            pod("one", "node-a", &["10.1.0.1", "fd00::1"]),
            pod("two", "node-b", &["10.1.0.2"]),
            pod("unready", "node-a", &["10.1.0.3"]),
        ];
        let network = NetworkState::Found { addresses: None };
        let input = EndpointInput {
            spec,
            families: Families::DUAL,
            nodes: &nodes,
            network: &network,
            published: observed,
        };
        pack(&endpoints(&input, &pods), &PackInput::new(&owner(spec), observed))
    }

    /// The object as the API server stores it.
    fn stored(object: &EndpointSlice, number: usize) -> Value {
        let mut stored = serde_json::to_value(object).unwrap();
        let metadata = &mut stored["metadata"];
        metadata["name"] = format!("db-{number}").into();
        metadata["uid"] = format!("uid-{number}").into();
        metadata["resourceVersion"] = "7".into();
        metadata["generation"] = 1.into();
        stored
    }

    #[test]
    fn slices_that_were_written_are_read_as_planned_with_every_kind_of_hints() {
        let (zone, node) = (TrafficDistribution::SameZone, TrafficDistribution::SameNode);
        let (in_zone, on_node) = (json!([{"name": "zone-1"}]), json!([{"name": "node-a"}]));
        for (traffic, hints) in [
            (None, Value::Null),
            (Some(zone), json!({"forZones": in_zone})),
            (Some(node), json!({"forZones": in_zone, "forNodes": on_node})),
        ] {
            let spec = spec(traffic);
            let creates = plan(&spec, &[]).creates;
            assert_eq!(creates.len(), 2, "one slice of each family");
            let objects: Vec<Value> = creates
                .iter()
                .enumerate()
                .map(|(number, content)| stored(&slice_object("ns", &owner(&spec), content, None), number))
                .collect();
            let ipv4 = objects.iter().find(|slice| slice["addressType"] == "IPv4").unwrap();
            let endpoint = |name: &str| {
                let all = ipv4["endpoints"].as_array().unwrap();
                all.iter().find(|one| one["targetRef"]["name"] == name).unwrap()
            };
            assert_eq!(endpoint("one")["hints"], hints, "{traffic:?}");
            assert_eq!(endpoint("unready")["hints"], Value::Null);
            let observed: Vec<ObservedSlice> = objects
                .into_iter()
                .map(|object| project::slice(serde_json::from_value(object).unwrap()).unwrap().1)
                .collect();
            let observed: Vec<&ObservedSlice> = observed.iter().collect();
            let again = plan(&spec, &observed);
            assert!(again.is_empty(), "{traffic:?}: {again:#?}");
        }
    }

    #[test]
    fn hints_that_another_writer_changed_are_written_again() {
        let spec = spec(Some(TrafficDistribution::SameNode));
        let creates = plan(&spec, &[]).creates;
        for damage in [json!(null), json!({"forZones": [{"name": "zone-2"}]}), json!({"forNodes": []})] {
            let objects = creates.iter().enumerate().map(|(number, content)| {
                let mut object = stored(&slice_object("ns", &owner(&spec), content, None), number);
                object["endpoints"][0]["hints"] = damage.clone();
                project::slice(serde_json::from_value(object).unwrap()).unwrap().1
            });
            let observed: Vec<ObservedSlice> = objects.collect();
            let observed: Vec<&ObservedSlice> = observed.iter().collect();
            assert_eq!(plan(&spec, &observed).updates.len(), 2, "{damage}");
        }
    }

    #[test]
    fn r29_deprecated_topology_is_never_written_and_is_removed() {
        let spec = spec(None);
        let creates = plan(&spec, &[]).creates;
        let objects = creates.iter().enumerate().map(|(number, content)| {
            let mut object = stored(&slice_object("ns", &owner(&spec), content, None), number);
            assert!(object["endpoints"][0].get("deprecatedTopology").is_none(), "{object}");
            object["endpoints"][0]["deprecatedTopology"] = json!({"topology.kubernetes.io/zone": "zone-2"});
            project::slice(serde_json::from_value(object).unwrap()).unwrap().1
        });
        let observed: Vec<ObservedSlice> = objects.collect();
        let observed: Vec<&ObservedSlice> = observed.iter().collect();
        assert_eq!(plan(&spec, &observed).updates.len(), 2);
    }

    #[test]
    fn r38_an_update_carries_uid_and_resource_version_and_a_create_does_not() {
        let spec = spec(None);
        let content = plan(&spec, &[]).creates.remove(0);
        let target = SliceTarget { name: "db-1".into(), uid: "uid-1".into(), resource_version: "7".into() };
        let object = |target| {
            serde_json::to_value(slice_object("ns", &owner(&spec), &content, target)).unwrap()["metadata"]
                .take()
        };
        let updated = object(Some(&target));
        assert_eq!(
            [&updated["name"], &updated["uid"], &updated["resourceVersion"]],
            ["db-1", "uid-1", "7"].map(Value::from).each_ref()
        );
        let created = object(None);
        assert!(
            created["uid"].is_null() && created["resourceVersion"].is_null() && created["name"].is_null()
        );
        assert_eq!(created["generateName"], "db-");
        for metadata in [&created, &updated] {
            let owner = json!([{"apiVersion": "v1", "kind": "Service", "name": "db", "uid": "service-db",
                "controller": true, "blockOwnerDeletion": true}]);
            assert_eq!(metadata["ownerReferences"], owner);
        }
    }
}
