//! What is recorded about an attachment when it is made, so that it can be removed without its NAD.

use std::collections::BTreeSet;

use api::{
    network_status::NetworkStatus,
    selection::{NadRef, NetworkSelectionElement},
};
use ipnet::IpNet;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use serde_json::{Map, Value};

pub use crate::ipam::AttachmentKey;

/// The maximum length of the records of a pod in the journal, without the results of the last ADDs. The daemon has all
/// records of the node in memory.
pub(super) const MAX_POD_RECORDS: usize = 256 * 1024;

/// One attachment of a pod: its identity, the request, and how far it got. The journal holds it as one line of JSON.
///
/// The controller writes those of origin [`Origin::Hotplug`] with [`AddStep::intent`](super::AddStep::intent). The reader
/// of Multus' caches builds those of the other origins again at each observation; the journal holds one of them only from
/// its first DEL on, or once its link was renamed or moved. The record of the cluster's default network (the first delegate
/// in Multus' cache) is never built.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachmentRecord {
    /// The sandbox, and the interface that the plugin was asked for (`CNI_CONTAINERID` and `CNI_IFNAME`).
    pub key: AttachmentKey,
    pub pod: PodIdentity,
    #[serde(serialize_with = "write_nad", deserialize_with = "read_nad")]
    pub nad: NadRef,
    /// The NAD of the attachment is unknown, and `nad` is a guess. It is then not removed while its sandbox runs.
    #[serde(default)]
    pub nad_guessed: bool,
    pub origin: Origin,
    /// The boot ID of the node when it was recorded.
    pub boot: String,
    /// The path of the network namespace, as the runtime reports it.
    pub netns: String,
    /// The addresses that the element requested. `None` if they are not known: then no change is noticed.
    #[serde(default)]
    pub requested: Option<RequestedAddresses>,
    /// The CNI configuration or list as it was used: with a name, and with the element's `cni-args` in it.
    pub config: String,
    /// `CNI_ARGS`, in order.
    #[serde(default)]
    pub cni_args: Vec<(String, String)>,
    /// The capability arguments; the executor passes those that a plugin declares.
    #[serde(default)]
    pub capability_args: Map<String, Value>,
    /// The entries of earlier attachments with this key that network-status may still have.
    #[serde(default)]
    pub former_statuses: Vec<NetworkStatus>,
    /// A DEL was started. It may have released the addresses, so the attachment is removed even if it is requested again.
    #[serde(default)]
    pub removing: bool,
    pub phase: RecordPhase,
}

/// Who made an attachment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Origin {
    /// Patchbay, on the running pod.
    Hotplug,
    /// Multus, when the pod started. Multus also runs its DEL when the sandbox ends.
    PodStart,
    /// multus-dynamic-networks-controller, on the running pod. Nothing else runs its DEL when the sandbox ends.
    Original,
}

/// A pod as the API server and the runtime know it.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PodIdentity {
    pub namespace: String,
    pub name: String,
    /// `metadata.uid` in the API.
    pub uid: String,
    /// The UID by which the runtime knows the pod. It differs from `uid` for static pods.
    pub runtime_uid: String,
}

/// The addresses that an element requests, in a form in which equal requests are equal.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestedAddresses {
    #[serde(default)]
    pub ips: Vec<String>,
    #[serde(default)]
    pub mac: Option<String>,
}

/// How far an attachment got.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum RecordPhase {
    /// Written and synced before the plugin's ADD. Without a later phase it is unknown what the plugin did, unless the result
    /// cache of the node has its result.
    Intent {
        /// The indexes of all links of the pod's namespace before the ADD. None of them may be removed by a DEL.
        links_before: Vec<u32>,
    },
    /// Written and synced after the plugin's ADD.
    Attached(AttachedRecord),
    /// Written after a successful DEL, and for an attachment of another origin after its result in Multus' cache is deleted.
    /// The record stays until the pod's annotations no longer report the attachment ([`Step::Forget`](super::Step::Forget)).
    Removed,
}

/// What the plugin's ADD returned and created.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachedRecord {
    /// The CNI result as JSON text, for DEL.
    #[serde(default)]
    pub result: String,
    /// The entries of network-status for that result
    /// ([`AttachmentResult::statuses`](api::network_status::AttachmentResult::statuses), with the device information).
    #[serde(default)]
    pub statuses: Vec<NetworkStatus>,
    /// The links of the pod's namespace that the attachment consists of. Empty if it has none (a result without an interface
    /// in the pod): such an attachment is never lost.
    #[serde(default)]
    pub links: Vec<LinkIdentity>,
    /// The default routes that `default-route` replaced. Only the daemon reads them.
    #[serde(default)]
    pub replaced_routes: Vec<Value>,
}

/// How a link of an attachment is found again after it was renamed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkIdentity {
    /// The index in the pod's namespace. `None` for an attachment that another program made, until
    /// [`identify_links`](super::identify_links) has found the link: then `peer` identifies the link, and without it the name
    /// and the MAC address.
    #[serde(default)]
    pub index: Option<u32>,
    /// The name when it was recorded.
    pub name: String,
    #[serde(default)]
    pub mac: Option<String>,
    /// The index of the veth peer on the host, if the link has one there.
    #[serde(default)]
    pub peer: Option<u32>,
    /// The name of that peer. The kernel may give the index to the veth of another pod later. `None` in records of older
    /// versions.
    #[serde(default)]
    pub peer_name: Option<String>,
    /// The MAC address of that peer, likewise.
    #[serde(default)]
    pub peer_mac: Option<String>,
    /// The daemon saw the link move to another namespace, and not come back. It is then not lost.
    #[serde(default)]
    pub moved: bool,
}

impl AttachmentRecord {
    /// Whether Multus may have made the attachment because of its setting `defaultNetworks`, and not because the pod
    /// requested it.
    ///
    /// Multus' cache does not tell, and on nodes with its daemon that setting is in a file that only the daemon has. Multus
    /// takes default networks from its own namespace (`multusNamespace`), gives them no interface name and no addresses, and
    /// attaches none to pods of its own namespace, unless `systemNamespaces` or `multusNamespace` are changed. So an
    /// attachment from the pod's own namespace was requested by the pod, and so was one with another interface name than
    /// `net<N>` or with addresses.
    ///
    /// Any other attachment is removed only if a plan has seen an element that requests it. If the daemon did not run when
    /// the element was removed, the interface stays.
    pub fn may_be_default_network(&self) -> bool {
        let number = self.key.interface.strip_prefix("net");
        let unnamed =
            number.is_some_and(|text| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()));
        let addresses =
            self.requested.as_ref().is_some_and(|requested| *requested != RequestedAddresses::default());
        self.origin == Origin::PodStart && self.nad.namespace != self.pod.namespace && unnamed && !addresses
    }

    /// Whether a pod has the attachment, so that its record may not be dropped. `running` are the sandboxes that run.
    ///
    /// One whose DEL was started is not: it may have released the addresses.
    pub fn is_in_use(&self, running: &BTreeSet<String>) -> bool {
        let is_left = self.removing || self.phase == RecordPhase::Removed;
        running.contains(&self.key.container) && !is_left
    }

    /// The length in the journal in bytes.
    pub(super) fn length(&self) -> usize {
        // Cannot fail: all map keys of a record serialize as strings.
        serde_json::to_string(self).map_or(0, |text| text.len())
    }

    /// What the ADD returned and created, if it is recorded.
    pub fn attached(&self) -> Option<&AttachedRecord> {
        match &self.phase {
            RecordPhase::Attached(attached) => Some(attached),
            RecordPhase::Intent { .. } | RecordPhase::Removed => None,
        }
    }
}

impl RequestedAddresses {
    /// The addresses that an element requests.
    pub fn of(element: &NetworkSelectionElement) -> Self {
        Self::new(&element.ips, element.mac.as_deref())
    }

    /// Normalizes addresses: case and separators of the MAC address, forms of the IP addresses, and their order.
    pub fn new<S: AsRef<str>>(ips: &[S], mac: Option<&str>) -> Self {
        let mut ips: Vec<String> = ips.iter().map(|ip| normalize_ip(ip.as_ref())).collect();
        ips.sort();
        ips.dedup();
        Self { ips, mac: mac.map(normalize_mac).filter(|mac| !mac.is_empty()) }
    }
}

/// An address in the form in which Rust writes it. An address without prefix length stays without one.
fn normalize_ip(text: &str) -> String {
    let text = text.trim();
    if let Ok(net) = text.parse::<IpNet>() {
        return net.to_string();
    }
    text.parse::<std::net::IpAddr>().map_or_else(|_| text.to_ascii_lowercase(), |address| address.to_string())
}

/// A hardware address of any length as pairs of lower-case digits with colons.
pub(super) fn normalize_mac(text: &str) -> String {
    let digits: Vec<char> =
        text.chars().filter(char::is_ascii_hexdigit).map(|c| c.to_ascii_lowercase()).collect();
    let pairs: Vec<String> = digits.chunks(2).map(|pair| pair.iter().collect()).collect();
    pairs.join(":")
}

fn write_nad<S: Serializer>(nad: &NadRef, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(nad)
}

fn read_nad<'de, D: Deserializer<'de>>(deserializer: D) -> Result<NadRef, D::Error> {
    let text = String::deserialize(deserializer)?;
    let (namespace, name) =
        text.split_once('/').ok_or_else(|| D::Error::custom("expected namespace/name"))?;
    Ok(NadRef::new(namespace, name))
}
