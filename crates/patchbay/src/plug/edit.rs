//! The edits of the networks annotation. Pure: a pod in, the new annotation out.

use std::{collections::BTreeSet, net::IpAddr};

use anyhow::{Context as _, bail};
use api::{
    IfName,
    network_status::NetworkStatus,
    selection::{NETWORKS_ANNOTATION, NadRef, NetworkSelectionElement, SelectionEditor},
};
use serde_json::json;

use super::{NetworkName, pod::PodView};

/// A requested interface.
#[derive(Debug)]
pub struct PlugRequest {
    pub network: NetworkName,
    pub interface: Option<IfName>,
    pub ips: Vec<String>,
    pub mac: Option<String>,
}

/// What to remove.
#[derive(Debug)]
pub enum UnplugTarget {
    Interface(IfName),
    Network(NetworkName),
}

/// The new annotation, and which interface it is about.
#[derive(Debug, PartialEq, Eq)]
pub struct PlannedEdit {
    /// Whether the annotation has to be written.
    pub changed: bool,
    /// `None` removes it.
    pub annotation: Option<String>,
    /// `namespace/name` of the network.
    pub network: String,
    /// Empty if it is not known: the interface was never attached and has no requested name.
    pub interface: String,
}

/// One valid element of the annotation.
struct Requested {
    index: usize,
    nad: NadRef,
    /// Its requested name, or else the one that the pod's annotations report for it.
    interface: Option<String>,
    /// Whether the element itself has the name.
    named: bool,
    element: NetworkSelectionElement,
}

fn editor(pod: &PodView) -> anyhow::Result<SelectionEditor> {
    SelectionEditor::parse(pod.networks.as_deref()).with_context(|| {
        format!(
            "annotation {NETWORKS_ANNOTATION} of pod {}/{} is invalid; correct it with kubectl first",
            pod.namespace, pod.name
        )
    })
}

/// The valid elements. Those without a requested name have the reported interfaces of their network that no other element
/// names: first those with the requested addresses, then the others in order. The node daemon assigns them so too.
fn requested(pod: &PodView, editor: &SelectionEditor) -> Vec<Requested> {
    let entries = editor.entries().enumerate();
    let valid = entries.filter_map(|(index, entry)| Some((index, entry.element.as_ref().ok()?)));
    let mut all: Vec<Requested> = valid
        .map(|(index, element)| Requested {
            index,
            nad: element.reference(&pod.namespace),
            interface: element.interface.as_ref().map(|name| name.as_str().to_owned()),
            named: element.interface.is_some(),
            element: element.clone(),
        })
        .collect();
    let mut statuses: Vec<&NetworkStatus> = pod.statuses.iter().collect();
    statuses.sort_by_cached_key(|status| interface_order(&status.interface));
    let mut taken: BTreeSet<String> = all.iter().filter_map(|one| one.interface.clone()).collect();
    for same_addresses in [true, false] {
        for one in all.iter_mut().filter(|one| one.interface.is_none()) {
            let network = one.nad.to_string();
            let attached = statuses.iter().filter(|status| {
                status.name == network && (!same_addresses || has_addresses(status, &one.element))
            });
            let reports =
                pod.attachments.iter().filter(|report| !same_addresses && report.network == network);
            let names =
                attached.map(|status| &status.interface).chain(reports.map(|report| &report.interface));
            one.interface =
                names.filter(|name| !name.is_empty()).find(|name| !taken.contains(*name)).cloned();
            taken.extend(one.interface.clone());
        }
    }
    all
}

/// Whether an interface has the addresses that an element requests, and the element requests any.
fn has_addresses(status: &NetworkStatus, element: &NetworkSelectionElement) -> bool {
    let address = |text: &str| text.split('/').next().and_then(|host| host.trim().parse::<IpAddr>().ok());
    let has_ip =
        |ip: &String| address(ip).is_some_and(|ip| status.ips.iter().any(|own| address(own) == Some(ip)));
    let mac = element.mac.as_deref();
    (mac.is_some() || !element.ips.is_empty())
        && mac.is_none_or(|mac| same_mac(Some(mac), Some(&status.mac)))
        && element.ips.iter().all(has_ip)
}

/// Sorts `net2` before `net10`.
fn interface_order(name: &str) -> (String, u64) {
    let text = name.trim_end_matches(|c: char| c.is_ascii_digit());
    (text.to_owned(), name[text.len()..].parse().unwrap_or_default())
}

/// Adds an element, unless the annotation already has it.
pub fn plug(pod: &PodView, request: &PlugRequest) -> anyhow::Result<PlannedEdit> {
    let mut editor = editor(pod)?;
    let requested = requested(pod, &editor);
    let nad = request.network.reference(&pod.namespace);
    let interface = match &request.interface {
        Some(interface) => interface.clone(),
        None => free_name(pod, &requested)?,
    };
    let planned = |changed, annotation| PlannedEdit {
        changed,
        annotation,
        network: nad.to_string(),
        interface: interface.to_string(),
    };
    if let Some(same) = requested.iter().find(|one| one.interface.as_deref() == Some(interface.as_str())) {
        if same.nad != nad {
            bail!(
                "interface {interface} of pod {}/{} is on network {}; choose another --interface, or unplug it first",
                pod.namespace,
                pod.name,
                same.nad
            );
        }
        let other_addresses = !request.ips.is_empty() && request.ips != same.element.ips
            || request.mac.is_some() && !same_mac(request.mac.as_deref(), same.element.mac.as_deref());
        if other_addresses {
            bail!(
                "pod {}/{} already requests interface {interface} on network {nad} with other addresses; they cannot be \
                changed while it is attached: unplug it first",
                pod.namespace,
                pod.name
            );
        }
        return Ok(planned(false, pod.networks.clone()));
    }
    if let Some(default) =
        pod.statuses.iter().find(|status| status.interface == interface.as_str() && status.default)
    {
        bail!("interface {interface} is on the default network {} of the pod; choose another", default.name);
    }
    let element = NetworkSelectionElement {
        namespace: request.network.namespace.clone(),
        name: request.network.name.clone(),
        interface: Some(interface.clone()),
        ips: request.ips.clone(),
        mac: request.mac.clone(),
        ..NetworkSelectionElement::default()
    };
    let unchangeable = || format!("add to annotation {NETWORKS_ANNOTATION}");
    editor.append(&element).with_context(unchangeable)?;
    Ok(planned(true, editor.finish().with_context(unchangeable)?))
}

fn same_mac(one: Option<&str>, other: Option<&str>) -> bool {
    let parse = |text: Option<&str>| text.and_then(|text| text.parse::<api::Mac>().ok());
    parse(one) == parse(other)
}

/// `net` and the position of the new element, as Multus names it, or the lowest free name.
fn free_name(pod: &PodView, requested: &[Requested]) -> anyhow::Result<IfName> {
    let named = requested.iter().filter_map(|one| one.interface.clone());
    let statuses = pod.statuses.iter().map(|status| status.interface.clone());
    let attachments = pod.attachments.iter().map(|report| report.interface.clone());
    // Elements without an interface get theirs by their position.
    let coming =
        requested.iter().filter(|one| one.interface.is_none()).map(|one| format!("net{}", one.index + 1));
    let taken: BTreeSet<String> = named.chain(statuses).chain(attachments).chain(coming).collect();
    let position = requested.last().map_or(1, |last| last.index + 2);
    let mut names = std::iter::once(position).chain(1..).map(|number| format!("net{number}"));
    let name = names.find(|name| !taken.contains(name)).unwrap_or_default();
    name.parse().context("find a free interface name; set --interface")
}

/// Adds an element for an interface that exists and that no element requests.
pub fn request(pod: &PodView, network: &str, interface: &str) -> anyhow::Result<PlannedEdit> {
    let (namespace, name) = network.split_once('/').context("the network has no namespace")?;
    let namespace = Some(namespace.to_owned()).filter(|namespace| *namespace != pod.namespace);
    let network = NetworkName { namespace, name: name.to_owned() };
    plug(pod, &PlugRequest { network, interface: Some(interface.parse()?), ips: Vec::new(), mac: None })
}

/// Removes an element.
///
/// Elements of the same network without a requested name get the name of their interface. Otherwise the daemon could not
/// tell which of them was removed.
pub fn unplug(pod: &PodView, target: &UnplugTarget) -> anyhow::Result<PlannedEdit> {
    let mut editor = editor(pod)?;
    let requested = requested(pod, &editor);
    let selected: Vec<&Requested> = requested.iter().filter(|one| target.selects(pod, one)).collect();
    let [one] = selected[..] else {
        if selected.is_empty() {
            return unrequested(pod, &requested, target);
        }
        bail!(
            "pod {}/{} has {} interfaces on this network; name one with --interface: {}",
            pod.namespace,
            pod.name,
            selected.len(),
            list(&selected)
        );
    };
    let unchangeable = || format!("change annotation {NETWORKS_ANNOTATION}");
    let unnamed = |other: &&Requested| other.index != one.index && !other.named && other.nad == one.nad;
    for other in requested.iter().filter(unnamed).filter(|_| !one.named) {
        if let Some(interface) = &other.interface {
            editor.set(other.index, "interface", &json!(interface)).with_context(unchangeable)?;
        }
    }
    editor.remove(|index, _| index == one.index);
    Ok(PlannedEdit {
        changed: true,
        annotation: editor.finish().with_context(unchangeable)?,
        network: one.nad.to_string(),
        interface: one.interface.clone().unwrap_or_default(),
    })
}

impl UnplugTarget {
    fn selects(&self, pod: &PodView, one: &Requested) -> bool {
        match self {
            Self::Interface(interface) => one.interface.as_deref() == Some(interface.as_str()),
            Self::Network(network) => one.nad == network.reference(&pod.namespace),
        }
    }
}

/// No element requests the target: it is being removed, or was never there.
fn unrequested(pod: &PodView, requested: &[Requested], target: &UnplugTarget) -> anyhow::Result<PlannedEdit> {
    let reports =
        pod.attachments.iter().map(|report| (report.network.as_str(), report.interface.as_str(), false));
    let statuses = pod.statuses.iter().map(|one| (one.name.as_str(), one.interface.as_str(), one.default));
    let left = reports.chain(statuses).find(|(network, interface, _)| match target {
        UnplugTarget::Interface(name) => *interface == name.as_str(),
        UnplugTarget::Network(name) => *network == name.reference(&pod.namespace).to_string(),
    });
    let pod_name = format!("{}/{}", pod.namespace, pod.name);
    match left {
        Some((network, interface, true)) => {
            bail!(
                "interface {interface} is on the default network {network} of pod {pod_name}; it cannot be unplugged"
            )
        }
        Some((network, interface, false)) if network.contains('/') => Ok(PlannedEdit {
            changed: false,
            annotation: pod.networks.clone(),
            network: network.to_owned(),
            interface: interface.to_owned(),
        }),
        _ => {
            let what = match target {
                UnplugTarget::Interface(name) => format!("interface {name}"),
                UnplugTarget::Network(name) => format!("network {}", name.reference(&pod.namespace)),
            };
            let all: Vec<&Requested> = requested.iter().collect();
            if all.is_empty() {
                bail!("pod {pod_name} requests no networks, so {what} cannot be unplugged")
            }
            bail!("pod {pod_name} does not request {what}; it requests: {}", list(&all))
        }
    }
}

fn list(requested: &[&Requested]) -> String {
    let one = |one: &&Requested| match &one.interface {
        Some(interface) => format!("{interface} ({})", one.nad),
        None => format!("an interface without a name ({})", one.nad),
    };
    requested.iter().map(one).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests;
