mod alone;

use std::net::IpAddr;

use api::{
    Condition, IPAMClaimStatus, IPBlockSpec, IPBlockStatus,
    ipamclaim::ClaimAnnotations,
    ipblock::{ClaimedAddress, HolderRef},
    selection::NadRef,
};
use jiff::Timestamp;

use super::*;
use crate::claims::{Attached, PodElement};

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

fn owner(kind: OwnerKind, name: &str, uid: &str) -> OwnerRef {
    OwnerRef { kind, name: name.into(), uid: uid.to_owned() }
}

fn element_of(interface: Option<&str>, claim: Option<&str>) -> PodElement {
    PodElement {
        interface: interface.map(Into::into),
        nad: NadRef::new("a", "blue"),
        claim: claim.map(Into::into),
    }
}

/// A launcher of instance `vmi`, created at this second.
fn launcher(name: &str, created: i64) -> ClaimPod {
    ClaimPod {
        key: ObjectKey::new("a", name),
        uid: format!("uid-{name}"),
        created: Timestamp::from_second(created).unwrap(),
        deleting: false,
        launcher: true,
        controller: Some(owner(OwnerKind::VirtualMachineInstance, "vm1", "vmi")),
        elements: [element_of(Some("pod1"), Some("vm1.blue"))].into(),
        attached: [].into(),
        primary: Box::default(),
        has_status: false,
    }
}

/// A pod without a virtual machine.
fn plain(name: &str, created: i64) -> ClaimPod {
    ClaimPod { launcher: false, controller: None, ..launcher(name, created) }
}

fn attached(mut pod: ClaimPod, ip: Option<&str>) -> ClaimPod {
    let show = |ip: &str| Attached {
        interface: "pod1".into(),
        nad: None,
        ips: [ip.parse::<IpAddr>().unwrap()].into(),
    };
    (pod.attached, pod.has_status) = (ip.map(show).into_iter().collect(), true);
    pod
}

fn block(cidr: &str, reserved: &[(&str, &str)]) -> ObservedIpBlock {
    let claims = reserved.iter().map(|(address, uid)| ClaimedAddress {
        address: address.parse().unwrap(),
        claim: "a/vm1.blue".to_owned(),
        uid: (*uid).to_owned(),
    });
    ObservedIpBlock {
        uid: cidr.to_owned(),
        spec: IPBlockSpec {
            network: "blue".to_owned(),
            network_uid: "net".to_owned(),
            cidr: net(cidr),
            holder: HolderRef::claims(),
            lender: None,
            boot_id: String::new(),
        },
        status: IPBlockStatus { claims: claims.collect(), ..IPBlockStatus::default() },
    }
}

/// What one ADD reads; valid by default.
#[derive(Clone)]
struct Scene {
    pod: ClaimPod,
    ifname: &'static str,
    config: &'static str,
    requested: Vec<IpNet>,
    claim: Option<ClaimState>,
    vmi: Option<VmiFacts>,
    blocks: Vec<ObservedIpBlock>,
    network: &'static str,
    others: Vec<ClaimPod>,
    known: Option<HeldClaim>,
}

impl Scene {
    fn new() -> Self {
        let status =
            IPAMClaimStatus { ips: vec!["10.0.0.4/24".into(), "fd00::4/64".into()], ..Default::default() };
        let claim = ClaimState {
            key: ObjectKey::new("a", "vm1.blue"),
            uid: "claim".to_owned(),
            version: "1".to_owned(),
            created: Timestamp::UNIX_EPOCH,
            deleting: false,
            owner: Some(owner(OwnerKind::VirtualMachine, "vm1", "vm")),
            owner_count: 1,
            finalizers: Vec::new(),
            label: None,
            network: "blue".into(),
            interface: "".into(),
            annotations: ClaimAnnotations::default(),
            status,
        };
        let vmi = VmiFacts {
            uid: "vmi".to_owned(),
            controller: Some(owner(OwnerKind::VirtualMachine, "vm1", "vm")),
            deleting: false,
            finished: false,
            active_pods: 1,
            networks: Vec::new(),
            addresses: None,
        };
        Self {
            pod: launcher("target", 10),
            ifname: "pod1",
            config: "blue",
            requested: Vec::new(),
            claim: Some(claim),
            vmi: Some(vmi),
            blocks: vec![
                block("10.0.0.0/28", &[("10.0.0.4", "claim")]),
                block("fd00::/120", &[("fd00::4", "claim")]),
            ],
            network: "net",
            others: Vec::new(),
            known: None,
        }
    }

    fn with(change: impl FnOnce(&mut Self)) -> Self {
        let mut scene = Self::new();
        change(&mut scene);
        scene
    }

    fn claim(&mut self) -> &mut ClaimState {
        self.claim.as_mut().unwrap()
    }

    fn vmi(&mut self) -> &mut VmiFacts {
        self.vmi.as_mut().unwrap()
    }

    fn decide(&self) -> Result<Serving, ServeError> {
        decide(&ServeInput {
            pod: &self.pod,
            ifname: self.ifname,
            config_name: self.config,
            requested: &self.requested,
            claim_name: "vm1.blue",
            claim: self.claim.as_ref(),
            vmi: self.vmi.as_ref(),
            blocks: &self.blocks,
            network_uid: self.network,
            others: &self.others,
            known: self.known.as_ref(),
        })
    }

    fn shared(&self) -> bool {
        let served = self.decide().unwrap();
        assert_eq!(served.addresses, [net("10.0.0.4/24"), net("fd00::4/64")]);
        assert_eq!((served.claim.uid.as_str(), served.claim.name.as_str()), ("claim", "vm1.blue"));
        served.claim.shared
    }

    fn refused(&self) -> (ServeCode, String) {
        let error = self.decide().unwrap_err();
        (error.code(), error.to_string())
    }
}

#[test]
fn every_uid_must_fit() {
    let runs = "this pod runs VirtualMachineInstance vm1 (UID vmi); the pod starts once the claim of its own virtual \
        machine exists";
    let other = |belongs: &str, runs: &str| format!("IPAMClaim a/vm1.blue belongs to {belongs}, {runs}");
    let not_reserved = |address: &str| {
        format!(
            "address {address} of IPAMClaim a/vm1.blue is not reserved for it in any IPBlock; the kubelet retries"
        )
    };
    let mut instance = owner(OwnerKind::VirtualMachineInstance, "vm1", "vmi");
    for (what, change, text) in [
        (
            "no claim",
            Box::new(|one: &mut Scene| one.claim = None) as Box<dyn Fn(&mut Scene)>,
            "IPAMClaim a/vm1.blue does not exist yet; the pod starts once the patchbay controller has created it".to_owned(),
        ),
        (
            "claim of an earlier VM of this name",
            Box::new(|one| one.claim().owner.as_mut().unwrap().uid = "earlier".to_owned()),
            other("VirtualMachine vm1 (UID earlier)", runs),
        ),
        (
            "claim of an earlier instance of this name",
            Box::new(|one| {
                one.claim().owner = Some(owner(OwnerKind::VirtualMachineInstance, "vm1", "earlier"));
            }),
            other("VirtualMachineInstance vm1 (UID earlier)", runs),
        ),
        (
            "the UID of the VM as the UID of an instance",
            Box::new(|one| one.claim().owner = Some(owner(OwnerKind::VirtualMachineInstance, "vm1", "vm"))),
            other("VirtualMachineInstance vm1 (UID vm)", runs),
        ),
        ("an instance without a VM", Box::new(|one| one.vmi().controller = None), other("VirtualMachine vm1 (UID vm)", runs)),
        ("an instance that is gone", Box::new(|one| one.vmi = None), other("VirtualMachine vm1 (UID vm)", runs)),
        (
            "a newer instance of this name",
            Box::new(|one| one.vmi().uid = "newer".to_owned()),
            other("VirtualMachine vm1 (UID vm)", runs),
        ),
        (
            "a pod that is no launcher",
            Box::new(|one| one.pod.launcher = false),
            other("VirtualMachine vm1 (UID vm)", "this pod runs no virtual machine; the pod starts once the claim of its own \
                virtual machine exists"),
        ),
        (
            "a launcher of another kind of owner",
            Box::new(|one| one.pod.controller.as_mut().unwrap().kind = OwnerKind::Other),
            other("VirtualMachine vm1 (UID vm)", "this pod runs no virtual machine; the pod starts once the claim of its own \
                virtual machine exists"),
        ),
        (
            "an element of another claim",
            Box::new(|one| one.pod.elements[0].claim = Some("vm1.red".into())),
            "pod a/target has no element for interface pod1 in k8s.v1.cni.cncf.io/networks; the kubelet retries".to_owned(),
        ),
        (
            "another interface",
            Box::new(|one| one.ifname = "pod2"),
            "pod a/target has no element for interface pod2 in k8s.v1.cni.cncf.io/networks; the kubelet retries".to_owned(),
        ),
        (
            "another config",
            Box::new(|one| one.config = "red"),
            "IPAMClaim a/vm1.blue is for network blue, this attachment is of network red; the pod starts once the claim is \
                replaced".to_owned(),
        ),
        ("another claim's reservation", Box::new(|one| one.blocks[0].status.claims[0].uid = "other".to_owned()), not_reserved("10.0.0.4/24")),
        ("no reservation", Box::new(|one| one.blocks[1].status.claims.clear()), not_reserved("fd00::4/64")),
        ("no block", Box::new(|one| one.blocks.clear()), not_reserved("10.0.0.4/24")),
        ("a block of another network", Box::new(|one| one.network = "other"), not_reserved("10.0.0.4/24")),
        (
            "a block of a node",
            Box::new(|one| one.blocks[0].spec.holder = HolderRef { node: "n".to_owned(), uid: "u".to_owned() }),
            not_reserved("10.0.0.4/24"),
        ),
        (
            "a holder of this name with another UID",
            Box::new(|one| one.blocks[0].spec.holder.uid = "other".to_owned()),
            not_reserved("10.0.0.4/24"),
        ),
        ("an edited address", Box::new(|one| one.claim().status.ips[0] = "10.0.0.5/24".to_owned()), not_reserved("10.0.0.5/24")),
        ("text that is no address", Box::new(|one| one.claim().status.ips[0] = "x".to_owned()), not_reserved("x")),
        (
            "a removed address",
            Box::new(|one| drop(one.claim().status.ips.pop())),
            "address fd00::4 is reserved for IPAMClaim a/vm1.blue and missing in its status; the kubelet retries".to_owned(),
        ),
        (
            "no addresses",
            Box::new(|one| one.claim().status = IPAMClaimStatus::default()),
            "IPAMClaim a/vm1.blue has no addresses yet; the pod starts once it has".to_owned(),
        ),
        (
            "a failed allocation",
            Box::new(|one| {
                one.claim().status.ips.clear();
                one.claim().status.conditions.push(Condition {
                    r#type: IPS_ALLOCATED.to_owned(),
                    reason: "SubnetExhausted".to_owned(),
                    message: "why".to_owned(),
                    ..serde_json::from_str(
                        r#"{"type":"","status":"False","reason":"","message":"","lastTransitionTime":"2026-01-01T00:00:00Z"}"#,
                    )
                    .unwrap()
                });
            }),
            "IPAMClaim a/vm1.blue has no addresses yet (SubnetExhausted: why); the pod starts once it has".to_owned(),
        ),
    ] {
        let scene = Scene::with(|one| change(one));
        assert_eq!(scene.refused(), (ServeCode::Retry, text), "{what}");
    }
    assert!(!Scene::new().shared());
    // A lone instance owns its claim.
    instance.uid = "vmi".to_owned();
    let lone = Scene::with(|one| {
        one.claim().owner = Some(instance);
        one.vmi().controller = None;
    });
    assert!(!lone.shared());
    // A second reservation of a family is an orphan that the controller releases.
    let orphan = block("10.0.0.16/28", &[("10.0.0.17", "claim")]);
    assert!(!Scene::with(|one| one.blocks.push(orphan)).shared());
    // A claim that is being deleted serves as long as its reservation exists.
    assert!(!Scene::with(|one| one.claim().deleting = true).shared());
}

#[test]
fn a_requested_address_must_be_the_claims() {
    for (requested, refused) in [
        (vec![], None),
        (vec!["10.0.0.4/32", "fd00::4/128"], None),
        (vec!["10.0.0.4/24"], None),
        (vec!["10.0.0.5/32"], Some("10.0.0.5")),
        (vec!["10.0.0.4/24", "fd00::5/64"], Some("fd00::5/64")),
        (vec!["10.0.0.4/16"], Some("10.0.0.4/16")),
    ] {
        let scene = Scene::with(|one| one.requested = requested.iter().map(|text| net(text)).collect());
        let text = refused.map(|requested| {
            format!(
                "the element requests {requested}, but IPAMClaim a/vm1.blue has 10.0.0.4/24, fd00::4/64; remove ips from the \
                element"
            )
        });
        assert_eq!(scene.decide().err().map(|error| error.to_string()), text);
        if text.is_some() {
            assert_eq!(scene.refused().0, ServeCode::Invalid);
        }
    }
}

#[test]
fn launchers_of_one_machine_share_the_addresses() {
    let held = |uid: &str, shared| HeldClaim { uid: uid.to_owned(), name: "vm1.blue".to_owned(), shared };
    let source = || attached(launcher("source", 5), Some("10.0.0.4"));
    let unrelated = || ClaimPod { elements: [].into(), ..attached(plain("web", 1), Some("10.0.0.9")) };
    for (what, others, known, shared) in [
        ("the first launcher", vec![], None, false),
        ("the list contains the pod itself", vec![launcher("target", 10)], None, false),
        ("an unrelated pod", vec![unrelated()], None, false),
        ("a migration target", vec![launcher("target", 10), source()], None, true),
        ("the source has no network-status yet", vec![launcher("source", 5)], None, true),
        (
            "a source that shows the address and lost its reference",
            vec![ClaimPod { elements: [].into(), ..source() }],
            None,
            true,
        ),
        ("a terminating source", vec![ClaimPod { deleting: true, ..source() }], None, true),
        (
            "a launcher of the instance before a restart",
            vec![ClaimPod {
                controller: Some(owner(OwnerKind::VirtualMachineInstance, "vm1", "old")),
                ..source()
            }],
            None,
            true,
        ),
        ("a repeated ADD of the first launcher", vec![source()], Some(held("claim", false)), false),
        ("a repeated ADD after the source ended", vec![], Some(held("claim", true)), true),
        ("an earlier claim says nothing", vec![], Some(held("earlier", true)), false),
    ] {
        let scene = Scene::with(|one| (one.others, one.known) = (others, known));
        assert_eq!(scene.shared(), shared, "{what}");
    }
}

#[test]
fn the_element_of_an_interface_is_found_by_name_and_then_by_place() {
    let claim = |name: &str| ElementMatch::Claim(name.into());
    let pod = |elements: &[(Option<&str>, Option<&str>)], launcher| {
        let elements = elements.iter().map(|(interface, claim)| element_of(*interface, *claim));
        ClaimPod { elements: elements.collect(), launcher, ..plain("p", 1) }
    };
    let (one, two) = ((Some("pod1"), Some("one")), (Some("pod2"), None));
    for (elements, launcher, ifname, expected) in [
        (&[one, two][..], true, "pod1", claim("one")),
        (&[one, two], true, "pod2", ElementMatch::Ordinary),
        (&[one, two], true, "pod0123456789a", ElementMatch::Doubt),
        (&[one, two], false, "pod0123456789a", ElementMatch::Doubt),
        (&[two], false, "pod0123456789a", ElementMatch::None),
        (&[two], true, "pod0123456789a", ElementMatch::Doubt),
        (&[], false, "net1", ElementMatch::None),
        (&[], true, "net1", ElementMatch::Doubt),
        (&[(None, Some("a")), (None, Some("b"))], false, "net2", claim("b")),
        (&[(None, Some("a")), (None, None)], false, "net2", ElementMatch::Ordinary),
        // The name decides before the place.
        (&[(None, Some("a")), (Some("net1"), Some("b"))], false, "net1", claim("b")),
        // An element that requests another name is not at its place.
        (&[one, two], true, "net1", ElementMatch::Doubt),
        (&[(None, Some("a"))], false, "net2", ElementMatch::Doubt),
        (&[(None, Some("a"))], false, "net0", ElementMatch::Doubt),
        (&[(None, Some("a"))], false, "net", ElementMatch::None),
        // The default network has no element.
        (&[], true, "eth0", ElementMatch::None),
        (&[one, two], true, "eth0", ElementMatch::None),
        (&[one, two], false, "eth0", ElementMatch::None),
        (&[(Some("eth0"), Some("a"))], false, "eth0", claim("a")),
        (&[one], true, "pod0123456789", ElementMatch::None),
        (&[one], true, "pod0123456789x", ElementMatch::None),
    ] {
        assert_eq!(element(&pod(elements, launcher), ifname), expected, "{elements:?} {ifname}");
    }
}
