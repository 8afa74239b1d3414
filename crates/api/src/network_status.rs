//! The annotation in which the networks of a pod are reported.
//!
//! Several programs write it. Entries of others keep every byte; entries of Patchbay have the layout that Multus writes.

use std::net::IpAddr;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Serializer, ser::PrettyFormatter};

use crate::{
    IfName, RawJson,
    raw_json::{error_text, list_items},
    selection::{NadRef, Position},
};

/// The annotation that reports the networks of a pod.
pub const NETWORK_STATUS_ANNOTATION: &str = "k8s.v1.cni.cncf.io/network-status";

/// One interface of a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NetworkStatus {
    /// `namespace/name` of the NAD, or the name of the cluster's default network.
    pub name: String,
    /// The name of the interface in the pod.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub interface: String,
    /// The IP addresses, without prefix length.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    pub ips: Vec<String>,
    /// The MAC address.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub mac: String,
    /// The MTU, if the CNI plugin reported it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// Whether this is the pod's default network.
    #[serde(skip_serializing_if = "is_false")]
    pub default: bool,
    /// The DNS settings. Written even if they are empty.
    #[serde(deserialize_with = "null_as_default")]
    pub dns: Dns,
    /// The device of the interface.
    #[serde(rename = "device-info", skip_serializing_if = "Option::is_none")]
    pub device_info: Option<DeviceInfo>,
    /// The gateways of the default routes.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    pub gateway: Vec<String>,
}

/// DNS settings.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Dns {
    /// The name servers.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    pub nameservers: Vec<String>,
    /// The local domain.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub domain: String,
    /// The search domains.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    pub search: Vec<String>,
    /// The options of the resolver.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    pub options: Vec<String>,
}

/// The device of an interface, as the device information specification describes it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub struct DeviceInfo {
    /// The type: pci, vhost-user, memif or vdpa.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub r#type: String,
    /// The version of the specification.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub version: String,
    /// The PCI device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pci: Option<PciDevice>,
    /// The vDPA device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vdpa: Option<VdpaDevice>,
    /// The vhost-user device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vhost_user: Option<VhostUserDevice>,
    /// The memif device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memif: Option<MemifDevice>,
}

/// A PCI device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub struct PciDevice {
    /// The PCI address.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub pci_address: String,
    /// The path of the vhost-net device.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub vhost_net: String,
    /// The RDMA device.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub rdma_device: String,
    /// The PCI address of the physical function.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub pf_pci_address: String,
    /// The representor of the virtual function.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub representor_device: String,
}

/// A vDPA device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub struct VdpaDevice {
    /// The parent device.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub parent_device: String,
    /// The driver: vhost or virtio.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub driver: String,
    /// The path of the device.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub path: String,
    /// The PCI address.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub pci_address: String,
    /// The PCI address of the physical function.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub pf_pci_address: String,
    /// The representor of the virtual function.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub representor_device: String,
}

/// A vhost-user device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct VhostUserDevice {
    /// The mode: client or server.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub mode: String,
    /// The path of the socket.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub path: String,
}

/// A memif device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MemifDevice {
    /// The role: master or slave.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub role: String,
    /// The path of the socket.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub path: String,
    /// The mode: ethernet, ip or punt.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub mode: String,
}

/// The content of the annotation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NetworkStatusList {
    entries: Vec<StatusEntry>,
}

/// One entry of the annotation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatusEntry {
    text: RawJson,
    status: Option<NetworkStatus>,
}

/// Why the annotation cannot be parsed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{NETWORK_STATUS_ANNOTATION} is not a JSON list: {cause} at {position}")]
pub struct Error {
    /// Where the parser stopped.
    pub position: Position,
    /// What it expected.
    pub cause: String,
}

/// What a CNI plugin reports about an attachment, as far as the annotation repeats it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AttachmentResult {
    /// The interfaces, on the host and in the pod.
    pub interfaces: Vec<AttachedInterface>,
    /// The addresses, each with the index of its interface if it is known.
    pub ips: Vec<(IpAddr, Option<usize>)>,
    /// The gateways of the default routes.
    pub gateways: Vec<IpAddr>,
    /// The DNS settings.
    pub dns: Dns,
}

/// An interface that a CNI plugin reports.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AttachedInterface {
    /// Its name.
    pub name: String,
    /// Its MAC address, if it is reported.
    pub mac: String,
    /// Its MTU, if it is reported.
    pub mtu: Option<u32>,
    /// Whether it is in the pod: it has a sandbox.
    pub in_pod: bool,
}

impl NetworkStatusList {
    /// Parses the value of the annotation. An absent or empty annotation is an empty list.
    pub fn parse(text: Option<&str>) -> Result<Self, Error> {
        let Some(text) = text.filter(|text| !text.trim().is_empty()) else { return Ok(Self::default()) };
        let error = |error: serde_json::Error| Error {
            position: Position { line: error.line(), column: error.column() },
            cause: error_text(&error),
        };
        let entries = list_items(text).map_err(error)?.into_iter().map(StatusEntry::parse);
        Ok(Self { entries: entries.collect::<serde_json::Result<_>>().map_err(error)? })
    }

    /// The entries, in the order of the annotation.
    pub fn entries(&self) -> &[StatusEntry] {
        &self.entries
    }

    /// Removes the entries that the predicate rejects. It is not called for entries that are not a network status: they stay.
    pub fn retain(&mut self, mut keep: impl FnMut(&NetworkStatus) -> bool) {
        self.entries.retain(|entry| entry.status.as_ref().is_none_or(&mut keep));
    }

    /// Replaces the entries of an attachment, which the predicate selects.
    ///
    /// The new entries are where the first old one was, or at the end. An entry that does not change keeps its bytes.
    pub fn replace(&mut self, mut selected: impl FnMut(&NetworkStatus) -> bool, new: &[NetworkStatus]) {
        let (mut kept, mut old, mut at) = (Vec::new(), Vec::new(), None);
        for entry in std::mem::take(&mut self.entries) {
            if entry.status.as_ref().is_some_and(&mut selected) {
                at.get_or_insert(kept.len());
                old.push(entry);
            } else {
                kept.push(entry);
            }
        }
        let unchanged =
            |status: &NetworkStatus| old.iter().find(|entry| entry.status.as_ref() == Some(status));
        let new =
            new.iter().map(|status| unchanged(status).cloned().unwrap_or_else(|| StatusEntry::new(status)));
        let at = at.unwrap_or(kept.len());
        kept.splice(at..at, new);
        self.entries = kept;
    }

    /// Inserts entries before all others.
    pub fn prepend(&mut self, new: &[NetworkStatus]) {
        self.entries.splice(..0, new.iter().map(StatusEntry::new));
    }

    /// The value of the annotation, in the layout of Multus.
    pub fn render(&self) -> String {
        let entries: Vec<&str> = self.entries.iter().map(|entry| entry.text.as_str()).collect();
        format!("[{}]", entries.join(","))
    }
}

impl StatusEntry {
    fn parse(text: &str) -> serde_json::Result<Self> {
        // Serde would read a list into a struct too.
        let status = if text.starts_with('{') { serde_json::from_str(text).ok() } else { None };
        Ok(Self { text: RawJson::parse(text)?, status })
    }

    fn new(status: &NetworkStatus) -> Self {
        Self { text: status.render(), status: Some(status.clone()) }
    }

    /// The text of the entry.
    pub fn text(&self) -> &str {
        self.text.as_str()
    }

    /// The entry, unless it is not a network status.
    pub fn status(&self) -> Option<&NetworkStatus> {
        self.status.as_ref()
    }
}

impl NetworkStatus {
    /// The entry with an indent of four blanks, as Multus writes it.
    fn render(&self) -> RawJson {
        let mut bytes = Vec::new();
        let mut serializer = Serializer::with_formatter(&mut bytes, PrettyFormatter::with_indent(b"    "));
        // Strings, numbers and lists of them can always be written to memory.
        let _ = self.serialize(&mut serializer);
        RawJson::parse(&String::from_utf8_lossy(&bytes))
            .unwrap_or_else(|_| RawJson::from(&serde_json::json!({})))
    }
}

impl AttachmentResult {
    /// The entries for an attachment to a NAD: one for each interface in the pod.
    ///
    /// An address without an interface belongs to the last interface, all addresses to the only one, and an address of an
    /// interface on the host is left out, as Multus does. Other than with Multus, a result without an interface in the pod
    /// has an entry too: with the requested interface, so that it can be found again.
    pub fn statuses(
        &self,
        nad: &NadRef,
        requested: &IfName,
        device: Option<&DeviceInfo>,
    ) -> Vec<NetworkStatus> {
        let status = |interface: &AttachedInterface| NetworkStatus {
            name: nad.to_string(),
            interface: interface.name.clone(),
            mac: interface.mac.clone(),
            mtu: interface.mtu.filter(|&mtu| mtu != 0),
            dns: self.dns.clone(),
            device_info: device.cloned(),
            gateway: self.gateways.iter().map(ToString::to_string).collect(),
            ..NetworkStatus::default()
        };
        let in_pod: Vec<usize> =
            (0..self.interfaces.len()).filter(|&index| self.interfaces[index].in_pod).collect();
        let mut statuses: Vec<NetworkStatus> =
            in_pod.iter().map(|&index| status(&self.interfaces[index])).collect();
        if statuses.is_empty() {
            let reported = self.interfaces.iter().find(|interface| interface.name == requested.as_str());
            let unknown = AttachedInterface { name: requested.to_string(), ..AttachedInterface::default() };
            statuses.push(status(reported.unwrap_or(&unknown)));
        }
        let only = self.interfaces.len() < 2 || in_pod.is_empty();
        let last = statuses.len() - 1;
        for (address, interface) in &self.ips {
            let at = match interface {
                Some(index) if !only => in_pod.iter().position(|it| it == index),
                _ => Some(last),
            };
            if let Some(at) = at {
                statuses[at].ips.push(address.to_string());
            }
        }
        statuses
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde calls")]
fn is_false(value: &bool) -> bool {
    !value
}

/// Go writes an empty list or object as null in some cases.
fn null_as_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// As Multus writes it for a pod with a default network and one secondary network.
    const WRITTEN_BY_MULTUS: &str = r#"[{
    "name": "cbr0",
    "interface": "eth0",
    "ips": [
        "10.244.1.5"
    ],
    "mac": "aa:bb:cc:dd:ee:01",
    "default": true,
    "dns": {},
    "gateway": [
        "10.244.1.1"
    ]
},{
    "name": "default/blue",
    "interface": "net1",
    "ips": [
        "10.1.0.5",
        "fd00::5"
    ],
    "mac": "02:00:00:00:00:01",
    "mtu": 1450,
    "dns": {
        "nameservers": [
            "10.1.0.2"
        ],
        "domain": "blue.example",
        "search": [
            "example"
        ],
        "options": [
            "ndots:1"
        ]
    },
    "device-info": {
        "type": "pci",
        "version": "1.1.0",
        "pci": {
            "pci-address": "0000:01:02.3",
            "rdma-device": "mlx5_3",
            "pf-pci-address": "0000:01:00.0",
            "representor-device": "eth5"
        }
    }
}]"#;

    fn blue() -> NadRef {
        NadRef::new("default", "blue")
    }

    fn net1() -> IfName {
        "net1".parse().unwrap()
    }

    fn inside(name: &str) -> AttachedInterface {
        AttachedInterface { name: name.to_owned(), in_pod: true, ..AttachedInterface::default() }
    }

    fn outside(name: &str) -> AttachedInterface {
        AttachedInterface { in_pod: false, ..inside(name) }
    }

    /// The interface and addresses of each entry.
    fn summary(statuses: &[NetworkStatus]) -> Vec<(&str, Vec<&str>)> {
        statuses
            .iter()
            .map(|status| (status.interface.as_str(), status.ips.iter().map(String::as_str).collect()))
            .collect()
    }

    fn with_ips(interfaces: Vec<AttachedInterface>, ips: &[(&str, Option<usize>)]) -> Vec<NetworkStatus> {
        let ips = ips.iter().map(|(ip, index)| (ip.parse().unwrap(), *index)).collect();
        AttachmentResult { interfaces, ips, ..AttachmentResult::default() }.statuses(&blue(), &net1(), None)
    }

    #[test]
    fn entries_are_written_as_multus_writes_them() {
        let list = NetworkStatusList::parse(Some(WRITTEN_BY_MULTUS)).unwrap();
        assert_eq!(list.render(), WRITTEN_BY_MULTUS);
        let mut written = NetworkStatusList::default();
        for entry in list.entries() {
            written.replace(|_| false, std::slice::from_ref(entry.status().unwrap()));
        }
        assert_eq!(written.render(), WRITTEN_BY_MULTUS);
        assert_eq!(written, list);
    }

    #[test]
    fn an_entry_is_built_from_the_result_of_a_plugin() {
        let result = AttachmentResult {
            interfaces: vec![
                outside("veth1"),
                AttachedInterface { mac: "02:00:00:00:00:01".to_owned(), mtu: Some(1450), ..inside("net1") },
            ],
            ips: vec![("10.1.0.5".parse().unwrap(), Some(1)), ("fd00::5".parse().unwrap(), Some(1))],
            dns: Dns {
                nameservers: vec!["10.1.0.2".to_owned()],
                domain: "blue.example".to_owned(),
                search: vec!["example".to_owned()],
                options: vec!["ndots:1".to_owned()],
            },
            gateways: Vec::new(),
        };
        let pci = PciDevice {
            pci_address: "0000:01:02.3".to_owned(),
            rdma_device: "mlx5_3".to_owned(),
            pf_pci_address: "0000:01:00.0".to_owned(),
            representor_device: "eth5".to_owned(),
            ..PciDevice::default()
        };
        let device = DeviceInfo {
            r#type: "pci".to_owned(),
            version: "1.1.0".to_owned(),
            pci: Some(pci),
            ..DeviceInfo::default()
        };
        let list = NetworkStatusList::parse(Some(WRITTEN_BY_MULTUS)).unwrap();
        let built = result.statuses(&blue(), &net1(), Some(&device));
        assert_eq!(built, [list.entries()[1].status().unwrap().clone()]);
    }

    #[test]
    fn each_interface_in_the_pod_has_an_entry() {
        let two = || vec![outside("veth1"), inside("net1"), inside("net1-b")];
        assert_eq!(
            summary(&with_ips(two(), &[("10.0.0.1", Some(1)), ("10.0.0.2", Some(2)), ("10.0.0.3", None)])),
            [("net1", vec!["10.0.0.1"]), ("net1-b", vec!["10.0.0.2", "10.0.0.3"])]
        );
        // Addresses of the host and of no interface.
        assert_eq!(
            summary(&with_ips(two(), &[("10.0.0.1", Some(0)), ("10.0.0.2", Some(7))])),
            [("net1", vec![]), ("net1-b", vec![])]
        );
        assert_eq!(
            summary(&with_ips(vec![inside("net1")], &[("10.0.0.1", Some(7))])),
            [("net1", vec!["10.0.0.1"])]
        );
    }

    #[test]
    fn a_result_without_an_interface_in_the_pod_has_the_requested_one() {
        for interfaces in [vec![], vec![outside("veth1")], vec![outside("veth1"), outside("veth2")]] {
            let statuses = with_ips(interfaces, &[("10.0.0.1", None), ("10.0.0.2", Some(0))]);
            assert_eq!(summary(&statuses), [("net1", vec!["10.0.0.1", "10.0.0.2"])]);
        }
        let known =
            AttachedInterface { mac: "02:00:00:00:00:01".to_owned(), mtu: Some(0), ..outside("net1") };
        let statuses = with_ips(vec![outside("veth1"), known], &[]);
        assert_eq!((statuses[0].mac.as_str(), statuses[0].mtu), ("02:00:00:00:00:01", None));
    }

    #[test]
    fn gateways_are_those_of_default_routes() {
        let gateways = vec!["10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap()];
        let result = AttachmentResult { gateways, ..AttachmentResult::default() };
        assert_eq!(result.statuses(&blue(), &net1(), None)[0].gateway, ["10.0.0.1", "fd00::1"]);
    }

    #[test]
    fn entries_of_other_writers_keep_their_bytes_and_place() {
        let foreign = r#"{ "name":"x", "example.com/y" : 1e3 }"#;
        let text = format!(
            r#"[ {foreign} , {{"name":"default/blue","interface":"net1"}}, ["default/blue"],{{"name": 7}}, {{"name":"default/red"}}]"#
        );
        let blue = |status: &NetworkStatus| status.name == "default/blue";
        let mut list = NetworkStatusList::parse(Some(&text)).unwrap();
        let status = |name: &str, interface: &str| NetworkStatus {
            name: name.to_owned(),
            interface: interface.to_owned(),
            ..NetworkStatus::default()
        };
        let rendered = |name: &str, interface: &str| {
            format!(
                "{{\n    \"name\": \"{name}\",\n    \"interface\": \"{interface}\",\n    \"dns\": {{}}\n}}"
            )
        };
        // An entry that is as wanted is not written again.
        list.replace(blue, &[status("default/blue", "net1")]);
        assert_eq!(list, NetworkStatusList::parse(Some(&text)).unwrap());
        list.replace(blue, &[status("default/blue", "net1"), status("default/blue", "net2")]);
        let two = rendered("default/blue", "net2");
        let expected = format!(
            r#"[{foreign},{{"name":"default/blue","interface":"net1"}},{two},["default/blue"],{{"name": 7}},{{"name":"default/red"}}]"#
        );
        assert_eq!(list.render(), expected);
        list.replace(|status| status.name == "new", &[status("new", "a")]);
        list.retain(|status| !blue(status));
        let expected = format!(
            r#"[{foreign},["default/blue"],{{"name": 7}},{{"name":"default/red"}},{}]"#,
            rendered("new", "a")
        );
        assert_eq!(list.render(), expected);
    }

    #[test]
    fn reading_is_tolerant_of_content_and_strict_about_the_list() {
        for text in [None, Some(""), Some(" \n"), Some("[]"), Some(" [ ] ")] {
            assert_eq!(NetworkStatusList::parse(text), Ok(NetworkStatusList::default()), "{text:?}");
        }
        assert_eq!(NetworkStatusList::default().render(), "[]");
        let list =
            NetworkStatusList::parse(Some(r#"[{"name":"a","ips":null,"dns":null,"device-info":null}]"#));
        assert_eq!(list.unwrap().entries()[0].status().unwrap().name, "a");
        let error = NetworkStatusList::parse(Some("[{\"name\":\n}]")).unwrap_err();
        assert_eq!(error.position, Position { line: 2, column: 1 });
        for text in ["{}", "7", "[", "[] []", "null"] {
            assert!(NetworkStatusList::parse(Some(text)).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_safe_and_its_entries_survive(text in any::<String>(), json in r#"\[[\[\]{}",: a-z0-9]{0,30}\]"#) {
            for text in [&text, &json] {
                if let Ok(list) = NetworkStatusList::parse(Some(text)) {
                    prop_assert_eq!(NetworkStatusList::parse(Some(&list.render())), Ok(list));
                }
            }
        }

        #[test]
        fn any_result_has_an_entry_and_no_address_twice(
            pods in prop::collection::vec(any::<bool>(), 0..4),
            indexes in prop::collection::vec(prop::option::of(0..5_usize), 0..5),
        ) {
            let interfaces = pods.iter().enumerate().map(|(index, in_pod)| AttachedInterface {
                name: format!("if{index}"), in_pod: *in_pod, ..AttachedInterface::default()
            });
            let ip = |number: usize| IpAddr::from([10, 0, 0, u8::try_from(number).unwrap()]);
            let ips = indexes.iter().enumerate().map(|(number, index)| (ip(number), *index));
            let result = AttachmentResult { interfaces: interfaces.collect(), ips: ips.collect(), ..AttachmentResult::default() };
            let statuses = result.statuses(&blue(), &net1(), None);
            prop_assert_eq!(statuses.len(), pods.iter().filter(|pod| **pod).count().max(1));
            let mut all: Vec<&String> = statuses.iter().flat_map(|status| &status.ips).collect();
            let count = all.len();
            all.sort();
            all.dedup();
            prop_assert_eq!(all.len(), count);
        }
    }
}
