//! The kind `NetworkService`: a headless Service on a secondary network.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Serialize};

use crate::{Condition, IfName};
#[cfg(feature = "kube")]
use crate::{bridgenetwork::MAX_CONDITIONS, list_schema};

/// The maximum number of ports of a NetworkService.
pub const MAX_PORTS: usize = 100;
/// The maximum number of labels in the selector of a NetworkService.
pub const MAX_SELECTOR_LABELS: usize = 32;

/// The value of [`MANAGED_BY_LABEL`] on the EndpointSlices of Patchbay.
pub const SLICE_MANAGER: &str = "networkservice.patchbay.dev";
/// Label on an EndpointSlice: the controller that manages it.
pub const MANAGED_BY_LABEL: &str = "endpointslice.kubernetes.io/managed-by";
/// Label on an EndpointSlice: the name of its Service.
pub const SERVICE_NAME_LABEL: &str = "kubernetes.io/service-name";
/// Label on an EndpointSlice of a headless Service. Its value is empty.
pub const HEADLESS_LABEL: &str = "service.kubernetes.io/headless";
/// Annotation on an EndpointSlice: the time of the change that caused its last write.
pub const TRIGGER_TIME_ANNOTATION: &str = "endpoints.kubernetes.io/last-change-trigger-time";
/// Annotation on an EndpointSlice, `namespace/name` of its NAD, and on a Service that the user owns, `[namespace/]name`.
pub const SERVICE_NETWORK_ANNOTATION: &str = "patchbay.dev/service-network";
/// Annotation on a Service that the user owns: the pods, as a label selector in the form that `kubectl -l` takes.
pub const SELECTOR_ANNOTATION: &str = "patchbay.dev/selector";
/// Annotation on a Service that the user owns: only addresses of this interface are published.
pub const INTERFACE_ANNOTATION: &str = "patchbay.dev/interface";
/// Annotation on a Service that the user owns: `None` or `PodName`.
pub const HOSTNAMES_ANNOTATION: &str = "patchbay.dev/hostnames";
/// Annotation on a Service: the UID of the NetworkService that may take it over.
pub const ADOPT_ANNOTATION: &str = "patchbay.dev/adopt";
/// Label on the pods of a KubeVirt virtual machine: the UID of its VirtualMachineInstance.
pub const VIRTUAL_MACHINE_LABEL: &str = "kubevirt.io/created-by";
/// Label on a Node: its zone.
pub const ZONE_LABEL: &str = "topology.kubernetes.io/zone";

// Doc comments of CRD fields are not wrapped, because `kubectl explain` keeps the line breaks.
/// The desired state of the service.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::CustomResource, schemars::JsonSchema))]
#[cfg_attr(
    feature = "kube",
    kube(
        group = "patchbay.dev",
        version = "v1alpha1",
        kind = "NetworkService",
        plural = "networkservices",
        shortname = "nsvc",
        category = "patchbay",
        namespaced,
        status = "NetworkServiceStatus",
        derive = "PartialEq",
        doc = "NetworkService is a headless Service on a secondary network. Patchbay creates a Service of the same name without selector, and EndpointSlices with the addresses that the selected pods have on that network.",
        validation = Rule::new("self.metadata.name.matches('^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$')").message("the name of a NetworkService becomes the name of a Service: at most 63 characters, a-z, 0-9 and '-', starting with a letter and not ending with '-'"),
        printcolumn = r#"{"name": "Network", "type": "string", "jsonPath": ".spec.network", "description": "NetworkAttachmentDefinition of the network"}"#,
        printcolumn = r#"{"name": "Endpoints", "type": "string", "jsonPath": ".status.endpoints.summary", "description": "Ready endpoints / all endpoints"}"#,
        printcolumn = r#"{"name": "Ready", "type": "string", "jsonPath": ".status.conditions[?(@.type==\"Ready\")].status", "description": "Whether the Service is in place and has a ready endpoint"}"#,
        printcolumn = r#"{"name": "Reason", "type": "string", "jsonPath": ".status.conditions[?(@.type==\"Ready\")].reason", "description": "Why the service is ready or not"}"#,
        printcolumn = r#"{"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}"#
    )
)]
#[serde(rename_all = "camelCase")]
pub struct NetworkServiceSpec {
    /// The type of the service. Headless: DNS answers with the addresses of the pods; there is no cluster IP.
    #[serde(default)]
    pub r#type: NetworkServiceType,
    /// The NetworkAttachmentDefinition of the network, as name or namespace/name. A name alone is looked up in the namespace of the NetworkService.
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 317), extend("x-kubernetes-validations" = [{"rule": "self.matches('^([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?/)?[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$') && size(self.substring(self.indexOf('/') + 1)) <= 253", "message": "spec.network is the name of a NetworkAttachmentDefinition, as name or namespace/name"}])))]
    pub network: String,
    /// The labels that a pod in the namespace of the NetworkService must have to be selected. At least one.
    #[cfg_attr(feature = "kube", schemars(with = "BTreeMap<String, SelectorValue>", extend("maxProperties" = MAX_SELECTOR_LABELS, "x-kubernetes-validations" = [
        {"rule": "size(self) > 0", "message": "spec.selector is empty; name at least one label, otherwise every pod of the namespace would be selected"},
        {"rule": "self.all(key, size(key) <= 317 && key.matches('^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9]$'))", "message": "a key of spec.selector is not a valid label key"},
    ])))]
    pub selector: BTreeMap<String, String>,
    /// The ports of the service, at most 100. Without ports, DNS has A and AAAA records but no SRV records.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(transform = list_schema::atomic(MAX_PORTS), extend("x-kubernetes-validations" = [
        {"rule": "size(self) < 2 || self.all(one, has(one.name))", "message": "several ports need a name each"},
        {"rule": "self.all(one, !has(one.name) || self.exists_one(other, has(other.name) && other.name == one.name))", "message": "two ports have the same name"},
        {"rule": "self.all(one, self.exists_one(other, other.port == one.port && other.protocol == one.protocol))", "message": "two ports have the same number and protocol"},
    ])))]
    pub ports: Vec<NetworkServicePort>,
    /// Whether the addresses of pods that are not ready are published as ready.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub publish_not_ready_addresses: bool,
    /// Publish only the addresses of the interface with this name in the pod, for pods that have several interfaces on the network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(with = "Option<String>", length(min = 1, max = 15), regex(pattern = "^[!-$&-.0-9;-~]+$"), extend("x-kubernetes-validations" = [{"rule": "!(self in ['.', '..', 'lo'])", "message": "no interface of a network can have this name"}])))]
    pub interface: Option<IfName>,
    /// The names of single pods. None: only pods whose spec.subdomain is the name of the service have one, their spec.hostname. PodName: POD.SERVICE.NAMESPACE.svc resolves for every pod whose name is a DNS label.
    #[serde(default)]
    pub hostnames: Hostnames,
}

/// The type of a NetworkService.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub enum NetworkServiceType {
    /// No cluster IP: DNS answers with the addresses of the pods.
    #[default]
    Headless,
}

/// Which pods get a DNS name of their own.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub enum Hostnames {
    /// Only pods whose `spec.subdomain` is the name of the service.
    #[default]
    None,
    /// Every pod, under its name.
    PodName,
}

/// One port of a NetworkService.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct NetworkServicePort {
    /// The name of the port, which is part of its SRV record. Required if there are several ports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(
        feature = "kube",
        schemars(length(min = 1, max = 63), regex(pattern = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"))
    )]
    pub name: Option<String>,
    /// The number of the port.
    #[cfg_attr(feature = "kube", schemars(range(min = 1, max = 65535)))]
    pub port: i32,
    /// The protocol: TCP, UDP or SCTP.
    #[serde(default)]
    pub protocol: Protocol,
    /// The port of the pods: a number, or the name of a container port, which may have another number in each pod. Defaults to port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(with = "Option<TargetPortSchema>"))]
    pub target_port: Option<TargetPort>,
    /// The application protocol, such as http or kubernetes.io/h2c. A hint for clients.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(
        feature = "kube",
        schemars(
            length(min = 1, max = 317),
            regex(
                pattern = r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
            )
        )
    )]
    pub app_protocol: Option<String>,
}

/// The protocol of a port.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "UPPERCASE")]
pub enum Protocol {
    /// TCP.
    #[default]
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
}

/// The port of the pods: a number or the name of a container port.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(untagged)]
pub enum TargetPort {
    /// A number.
    Number(i32),
    /// The name of a container port.
    Name(String),
}

/// The value of a label in a selector.
#[cfg(feature = "kube")]
#[derive(schemars::JsonSchema)]
#[schemars(transparent)]
#[expect(dead_code, reason = "only its schema is used")]
struct SelectorValue(
    #[schemars(length(max = 63), regex(pattern = "^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$"))] String,
);

/// The schema of [`TargetPort`]: the API server validates it by the rule, because it has two types.
#[cfg(feature = "kube")]
struct TargetPortSchema;

#[cfg(feature = "kube")]
impl schemars::JsonSchema for TargetPortSchema {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "TargetPort".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "x-kubernetes-int-or-string": true,
            "maxLength": 15,
            "x-kubernetes-validations": [{
                "rule": "type(self) == int ? int(self) >= 1 && int(self) <= 65535 : string(self).matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$') && string(self).matches('[a-z]') && !string(self).contains('--')",
                "message": "targetPort is a number from 1 to 65535 or the name of a container port",
            }],
        })
    }
}

/// The observed state of the service.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct NetworkServiceStatus {
    /// The generation of the spec that the controller has acted on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(range(min = 0)))]
    pub observed_generation: Option<i64>,
    /// How many endpoints the service has, by IP family. Written at most every 5 seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoints: Option<EndpointCounts>,
    /// Ready: the Service and its EndpointSlices are in place and at least one endpoint is ready; otherwise the reason is NoPods, NoAddresses, NotReady, NetworkNotFound, ServiceTaken or InvalidSpec. ForeignEndpoints: another controller or user publishes endpoints for the Service, so DNS answers with those too. DuplicateAddress: two pods report the same address, which is not published.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(transform = list_schema::map("type", MAX_CONDITIONS)))]
    pub conditions: Vec<Condition>,
}

/// The number of endpoints of a service.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct EndpointCounts {
    /// The endpoints with an IPv4 address.
    #[serde(default)]
    pub ipv4: FamilyCounts,
    /// The endpoints with an IPv6 address.
    #[serde(default)]
    pub ipv6: FamilyCounts,
    /// Both families together, as ready/total.
    #[serde(default)]
    #[cfg_attr(feature = "kube", schemars(length(max = 32)))]
    pub summary: String,
}

/// The number of endpoints of one IP family.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FamilyCounts {
    /// The endpoints that are ready.
    #[serde(default)]
    #[cfg_attr(feature = "kube", schemars(range(min = 0)))]
    pub ready: i32,
    /// All endpoints.
    #[serde(default)]
    #[cfg_attr(feature = "kube", schemars(range(min = 0)))]
    pub total: i32,
}

impl Protocol {
    /// The protocol as the API writes it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
            Self::Sctp => "SCTP",
        }
    }

    /// Reads the protocol of a Service, an EndpointSlice or a container port. An absent one means TCP.
    pub fn parse(text: Option<&str>) -> Option<Self> {
        match text {
            None | Some("TCP") => Some(Self::Tcp),
            Some("UDP") => Some(Self::Udp),
            Some("SCTP") => Some(Self::Sctp),
            Some(_) => None,
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Hostnames {
    /// Reads the value of [`HOSTNAMES_ANNOTATION`].
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "None" => Some(Self::None),
            "PodName" => Some(Self::PodName),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spec_keeps_its_form_and_gets_the_defaults() {
        let text = r#"{"network":"core","selector":{"app":"db"},"ports":[{"port":53,"protocol":"UDP","targetPort":"dns"},{"name":"b","port":80,"targetPort":8080}]}"#;
        let spec: NetworkServiceSpec = serde_json::from_str(text).unwrap();
        assert_eq!((spec.r#type, spec.hostnames), (NetworkServiceType::Headless, Hostnames::None));
        assert_eq!(spec.ports[0].target_port, Some(TargetPort::Name("dns".to_owned())));
        assert_eq!(spec.ports[1].target_port, Some(TargetPort::Number(8080)));
        assert_eq!((spec.ports[0].protocol, spec.ports[1].protocol), (Protocol::Udp, Protocol::Tcp));
        let written = serde_json::to_value(&spec).unwrap();
        assert_eq!(written["ports"][0]["targetPort"], "dns");
        assert_eq!(written["ports"][1]["targetPort"], 8080);
        assert_eq!(serde_json::from_value::<NetworkServiceSpec>(written).unwrap(), spec);
    }

    #[test]
    fn protocols_and_hostnames_are_read_as_the_api_writes_them() {
        for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Sctp] {
            assert_eq!(Protocol::parse(Some(protocol.as_str())), Some(protocol));
            assert_eq!(serde_json::to_value(protocol).unwrap(), protocol.as_str());
        }
        assert_eq!((Protocol::parse(None), Protocol::parse(Some("tcp"))), (Some(Protocol::Tcp), None));
        assert_eq!(Hostnames::parse("PodName"), Some(Hostnames::PodName));
        assert_eq!(Hostnames::parse("podname"), None);
    }

    #[cfg(feature = "kube")]
    #[test]
    fn the_crd_is_namespaced_and_has_every_rule() {
        use kube::CustomResourceExt as _;
        let crd = serde_json::to_value(NetworkService::crd()).unwrap();
        assert_eq!(crd["spec"]["scope"], "Namespaced");
        assert_eq!(crd["spec"]["names"]["shortNames"], serde_json::json!(["nsvc"]));
        assert_eq!(crd["spec"]["names"]["categories"], serde_json::json!(["patchbay"]));
        let version = &crd["spec"]["versions"][0];
        let columns: Vec<&str> = version["additionalPrinterColumns"]
            .as_array()
            .unwrap()
            .iter()
            .filter_map(|column| column["name"].as_str())
            .collect();
        assert_eq!(columns, ["Network", "Endpoints", "Ready", "Reason", "Age"]);
        let spec = &version["schema"]["openAPIV3Schema"]["properties"]["spec"];
        assert_eq!(spec["required"], serde_json::json!(["network", "selector"]));
        assert_eq!(spec["properties"]["type"]["enum"], serde_json::json!(["Headless"]));
        assert_eq!(spec["properties"]["ports"]["maxItems"], MAX_PORTS);
        let port = &spec["properties"]["ports"]["items"]["properties"];
        let bound = |name: &str| port["port"][name].as_f64().unwrap();
        assert!((bound("minimum") - 1.0).abs() < 0.1 && (bound("maximum") - 65535.0).abs() < 0.1);
        assert_eq!(port["targetPort"]["x-kubernetes-int-or-string"], true);
        let text = version["schema"].to_string();
        for message in [
            "the name of a NetworkService becomes the name of a Service",
            "spec.network is the name of a NetworkAttachmentDefinition",
            "spec.selector is empty",
            "a key of spec.selector is not a valid label key",
            "several ports need a name each",
            "two ports have the same name",
            "two ports have the same number and protocol",
            "targetPort is a number from 1 to 65535",
            "no interface of a network can have this name",
        ] {
            assert!(text.contains(message), "{message}");
        }
    }
}
