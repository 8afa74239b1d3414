use std::{cell::Cell, path::PathBuf};

use api::ipam::IpamSpec;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::*;
use crate::{
    claims::fake_api::FakeApi,
    network_snapshot::{NetworkState, NetworkView, Networks},
};

const V4: &str = "10.1.0.4/24";
const V6: &str = "fd01::4/64";
const BLOCKS: [&str; 2] = ["10.1.0.0/28", "fd01::/120"];

/// A lookup beside a fake API server.
struct Scene {
    api: Arc<FakeApi>,
    lookup: Arc<ClaimLookup>,
    networks: watch::Sender<Arc<Networks>>,
    dir: PathBuf,
}

impl Drop for Scene {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// What one ADD asks; of a launcher of the machine by default.
#[derive(Clone)]
struct Ask {
    pod: PodRef,
    interface: &'static str,
    config: &'static str,
    persistent: bool,
    requested: Vec<IpNet>,
}

impl Ask {
    fn of(pod: &str) -> Self {
        let pod = PodRef { namespace: "ns".to_owned(), name: pod.to_owned(), uid: format!("uid-{pod}") };
        Self { pod, interface: "net1", config: "blue", persistent: true, requested: Vec::new() }
    }
}

impl Scene {
    fn new(name: &str) -> Self {
        Self::with_blocks(name, BLOCKS)
    }

    /// The claims of a network have addresses, or had when persistence was switched off.
    fn set_claims(&self, has_claims: bool) {
        self.networks.send_modify(|networks| {
            let mut changed = Networks::clone(networks);
            changed.by_name.values_mut().for_each(|network| network.has_claims = has_claims);
            *networks = Arc::new(changed);
        });
    }

    fn with_blocks(name: &str, blocks: [&str; 2]) -> Self {
        let api = FakeApi::with_claim([V4, V6], blocks);
        let dir = std::env::temp_dir().join(format!("patchbay-claims-{}-{name}", std::process::id()));
        let ipam = Arc::new(Ipam::open(&dir, "boot", crate::ipam::Metrics::default()).unwrap());
        let spec: IpamSpec = serde_json::from_value(
            json!({"subnets": ["10.1.0.0/24", "fd01::/64"], "gateways": ["10.1.0.1"]}),
        )
        .unwrap();
        let pool = Pool::new("blue", &spec, |family| family.block_length(&spec), true);
        let view = NetworkView {
            uid: "uid-blue".to_owned(),
            state: NetworkState::NotSelected,
            closed: false,
            ipam: Some(Arc::new(pool)),
            has_claims: false,
        };
        let networks = Networks { synced: true, node: None, by_name: [("blue".to_owned(), view)].into() };
        let networks = watch::Sender::new(Arc::new(networks));
        let persistent = PersistentNads::default();
        persistent.set(&[]);
        let lookup = Arc::new(ClaimLookup {
            client: api.client(),
            runtime: Handle::current(),
            pods: OwnPods::unlisted(),
            networks: networks.subscribe(),
            persistent,
            ipam,
            metrics: Metrics::default(),
        });
        Self { api, lookup, networks, dir }
    }

    async fn resolve(&self, ask: &Ask) -> Result<Option<ServedClaim>, Error> {
        let (lookup, ask) = (Arc::clone(&self.lookup), ask.clone());
        let resolve = move || {
            lookup.resolve(&ClaimQuery {
                pod: &ask.pod,
                key: AttachmentKey { container: "c".to_owned(), interface: ask.interface.to_owned() },
                config: ask.config,
                persistent: ask.persistent,
                network: "blue",
                requested: &ask.requested,
                netns: "/run/netns/x",
                caller_alive: &|| Ok(()),
            })
        };
        tokio::task::spawn_blocking(resolve).await.unwrap()
    }

    async fn refused(&self, ask: &Ask) -> (u32, String) {
        let error = self.resolve(ask).await.unwrap_err();
        (error.code as u32, error.msg)
    }

    /// The pod is in the snapshot of the node's pods, too.
    fn cache(&self, pods: &[Value]) {
        self.lookup.pods.list(pods.to_vec());
    }
}

fn served(shared: bool) -> ServedClaim {
    let holders = HolderSelector {
        namespace: "ns".to_owned(),
        labels: "vmi.kubevirt.io/id=vm1".to_owned(),
        own_uid: "uid-target".to_owned(),
    };
    ServedClaim {
        infos: vec![
            AddressInfo { net: V4.parse().unwrap(), gateway: Some("10.1.0.1".parse().unwrap()) },
            AddressInfo { net: V6.parse().unwrap(), gateway: None },
        ],
        claim: LeaseClaim {
            uid: "claim-uid".to_owned(),
            name: "vm1.blue".to_owned(),
            shared,
            netns: "/run/netns/x".to_owned(),
        },
        holders: shared.then_some(holders),
    }
}

const LIVE: &str = "fieldSelector=status.phase%21%3DSucceeded%2Cstatus.phase%21%3DFailed";

fn own_list(pod: &str) -> String {
    format!("fieldSelector=metadata.name%3D{pod}")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn other_networks_need_no_request() {
    let scene = Scene::new("other");
    let ask = Ask { persistent: false, ..Ask::of("target") };
    assert_eq!(scene.resolve(&ask).await.unwrap(), None);
    // Neither for a pod of the snapshot that has no reference for the interface.
    let mut plain = FakeApi::launcher("target");
    plain["metadata"]["labels"] = json!({});
    plain["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] = json!("blue@net1, blue");
    scene.cache(&[plain.clone()]);
    assert_eq!(scene.resolve(&ask).await.unwrap(), None);
    scene.lookup.persistent.set(&[("red", "blue"), ("blue", "red")]);
    assert_eq!(scene.resolve(&ask).await.unwrap(), None);
    // On a persistent network the snapshot answers for a pod whose element has no reference.
    assert_eq!(scene.resolve(&Ask { persistent: true, ..ask.clone() }).await.unwrap(), None);
    assert_eq!(scene.api.requests(), [""; 0]);
    // A call that is not about a pod.
    let no_pod = Ask { pod: PodRef::default(), ..Ask::of("target") };
    assert_eq!(scene.resolve(&no_pod).await.unwrap(), None);
    assert_eq!(scene.api.requests(), [""; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_launcher_gets_the_addresses_of_its_claim() {
    let scene = Scene::new("served");
    scene.api.set_pod(FakeApi::launcher("target"));
    scene.cache(&[FakeApi::launcher("target")]);
    let reads = [
        "ipamclaims/vm1.blue",
        "virtualmachineinstances/vm1",
        "ipblocks/blue.10.1.0.0-28",
        "ipblocks/blue.6-fd01---120",
        &format!("{LIVE}&labelSelector=vmi.kubevirt.io%2Fid%3Dvm1"),
    ];
    let sorted = |mut all: Vec<String>| {
        for one in &mut all {
            let mut parts: Vec<&str> = one.split('&').collect();
            parts.sort_unstable();
            *one = parts.join("&");
        }
        all
    };
    // By the flag of the config, by the NADs, or by the reference alone.
    for (persistent, nads) in [(true, vec![]), (false, vec![("blue", "blue")]), (false, vec![])] {
        scene.lookup.persistent.set(&nads);
        let ask = Ask { persistent, ..Ask::of("target") };
        assert_eq!(scene.resolve(&ask).await.unwrap(), Some(served(false)));
        assert_eq!(sorted(scene.api.requests()), reads, "{persistent} {nads:?}");
    }
    // Without the pod in the snapshot, the API server is asked for it.
    scene.cache(&[]);
    assert_eq!(scene.resolve(&Ask::of("target")).await.unwrap(), Some(served(false)));
    assert_eq!(scene.api.requests()[0], own_list("target"));
    // A migration target.
    scene.api.set_pod(FakeApi::launcher("source"));
    assert_eq!(scene.resolve(&Ask::of("target")).await.unwrap(), Some(served(true)));
    assert_eq!(scene.lookup.metrics.served.get(), 5);
}

/// Persistence was switched off, and a migration target has the reference of its instance.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_pod_that_is_not_in_the_snapshot_gets_the_addresses_of_its_claim_on_a_network_with_claims() {
    let scene = Scene::new("off");
    scene.api.set_pod(FakeApi::launcher("target"));
    let ask = Ask { persistent: false, ..Ask::of("target") };
    scene.set_claims(true);
    assert_eq!(scene.resolve(&ask).await.unwrap(), Some(served(false)));
    assert_eq!(scene.api.requests()[0], own_list("target"));
    // An ordinary pod of the snapshot needs no request.
    let mut plain = FakeApi::launcher("target");
    plain["metadata"]["labels"] = json!({});
    plain["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] = json!("blue@net1, blue");
    scene.cache(&[plain]);
    assert_eq!(scene.resolve(&ask).await.unwrap(), None);
    assert_eq!(scene.api.requests(), [""; 0]);
}

/// It started before persistence was switched on, or no webhook gave it a reference.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_launcher_without_a_reference_gets_an_address_only_if_its_instance_exists() {
    let scene = Scene::new("no-instance");
    let mut pod = FakeApi::launcher("target");
    pod["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] = json!("blue@net1");
    scene.api.set_pod(pod.clone());
    // No element is for `lan`, and its name is none that KubeVirt or multus give.
    for (cached, interface) in
        [(vec![pod.clone()], "net1"), (vec![], "net1"), (vec![pod], "lan"), (vec![], "lan")]
    {
        scene.cache(&cached);
        let ask = Ask { interface, persistent: true, ..Ask::of("target") };
        assert_eq!(scene.resolve(&ask).await.unwrap(), None);
        for uid in [Some("later"), None] {
            match uid {
                Some(uid) => {
                    scene.api.edit("virtualmachineinstances/vm1", |vmi| vmi["metadata"]["uid"] = json!(uid));
                }
                None => scene.api.remove("virtualmachineinstances/vm1"),
            }
            let (code, msg) = scene.refused(&ask).await;
            assert_eq!(
                (code, msg.as_str()),
                (
                    11,
                    "VirtualMachineInstance vm1 (UID vmi-uid), which owns launcher pod ns/target, does not exist; the network has \
                     persistent addresses, so the pod gets none: delete the pod"
                )
            );
            // Other networks ask nothing.
            assert_eq!(scene.resolve(&Ask { persistent: false, ..ask.clone() }).await.unwrap(), None);
        }
        let metadata = json!({"name": "vm1", "namespace": "ns", "uid": "vmi-uid"});
        let instance =
            json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": metadata});
        scene.api.set("virtualmachineinstances/vm1", instance);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn the_default_interface_of_a_launcher_gets_any_address() {
    let scene = Scene::new("default");
    scene.api.set_pod(FakeApi::launcher("target"));
    scene.cache(&[FakeApi::launcher("target")]);
    let ask = Ask { interface: "eth0", persistent: false, ..Ask::of("target") };
    assert_eq!(scene.resolve(&ask).await.unwrap(), None);
    assert_eq!(scene.api.requests(), [""; 0]);
    assert_eq!(scene.resolve(&Ask { persistent: true, ..ask }).await.unwrap(), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn until_the_nads_are_listed_the_pod_decides() {
    let scene = Scene::new("unlisted");
    let lookup = ClaimLookup {
        persistent: PersistentNads::default(),
        client: scene.api.client(),
        runtime: Handle::current(),
        pods: scene.lookup.pods.clone(),
        networks: scene.lookup.networks.clone(),
        ipam: Arc::clone(&scene.lookup.ipam),
        metrics: Metrics::default(),
    };
    let scene = Scene {
        lookup: Arc::new(lookup),
        api: Arc::clone(&scene.api),
        dir: PathBuf::new(),
        networks: watch::Sender::default(),
    };
    scene.api.set_pod(FakeApi::launcher("target"));
    let ask = Ask { persistent: false, ..Ask::of("target") };
    assert_eq!(scene.resolve(&ask).await.unwrap(), Some(served(false)));
    scene.api.fail(Some("fieldSelector"));
    let (code, msg) = scene.refused(&ask).await;
    assert!(code == 11 && msg.starts_with("cannot read pod ns/target from the API server: "), "{msg}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_borrowed_address_is_reserved_in_its_own_block() {
    let scene = Scene::with_blocks("borrowed", ["10.1.0.4/32", "fd01::/120"]);
    scene.api.set_pod(FakeApi::launcher("target"));
    assert_eq!(scene.resolve(&Ask::of("target")).await.unwrap(), Some(served(false)));
    let blocks: Vec<String> =
        scene.api.requests().into_iter().filter(|one| one.starts_with("ipblocks/")).collect();
    assert_eq!(
        blocks,
        ["ipblocks/blue.10.1.0.0-28", "ipblocks/blue.10.1.0.4-32", "ipblocks/blue.6-fd01---120"]
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn any_doubt_is_an_error_and_never_another_address() {
    let claim = "ipamclaims/vm1.blue";
    for (what, change, code, text) in [
        (
            "the claim does not exist",
            Box::new(|api: &FakeApi| api.remove("ipamclaims/vm1.blue")) as Box<dyn Fn(&FakeApi)>,
            11,
            "IPAMClaim ns/vm1.blue does not exist yet; the pod starts once the patchbay controller has created it",
        ),
        (
            "the claim has no status",
            Box::new(|api| api.edit("ipamclaims/vm1.blue", |claim| claim["status"] = Value::Null)),
            11,
            "IPAMClaim ns/vm1.blue has no addresses yet; the pod starts once it has",
        ),
        (
            "the instance is another one",
            Box::new(|api| {
                api.edit("virtualmachineinstances/vm1", |vmi| vmi["metadata"]["uid"] = json!("other"));
            }),
            11,
            "IPAMClaim ns/vm1.blue belongs to VirtualMachine vm1 (UID vm-uid), this pod runs VirtualMachineInstance vm1 (UID \
             vmi-uid); the pod starts once the claim of its own virtual machine exists",
        ),
        (
            "the instance is gone",
            Box::new(|api| api.remove("virtualmachineinstances/vm1")),
            11,
            "this pod runs VirtualMachineInstance vm1 (UID vmi-uid)",
        ),
        (
            "the address is not reserved",
            Box::new(|api| api.remove("ipblocks/blue.10.1.0.0-28")),
            11,
            "address 10.1.0.4/24 of IPAMClaim ns/vm1.blue is not reserved for it in any IPBlock; the kubelet retries",
        ),
        (
            "the pod has no element for the interface",
            Box::new(|api| {
                api.edit("target", |pod| {
                    pod["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] = json!("blue@net7");
                });
            }),
            11,
            "pod ns/target has no element for interface net1 in k8s.v1.cni.cncf.io/networks; the kubelet retries",
        ),
        (
            "another pod has the name",
            Box::new(|api| api.edit("target", |pod| pod["metadata"]["uid"] = json!("other"))),
            11,
            "cannot read pod ns/target from the API server: no pod of this name has the UID uid-target; the kubelet retries",
        ),
        (
            "no claim can be read",
            Box::new(|api| api.fail(Some("ipamclaims"))),
            11,
            "cannot read IPAMClaim ns/vm1.blue from the API server: no; the kubelet retries",
        ),
        (
            "no instance can be read",
            Box::new(|api| api.fail(Some("virtual"))),
            11,
            "cannot read VirtualMachineInstance ns/vm1",
        ),
        (
            "no block can be read",
            Box::new(|api| api.fail(Some("ipblocks"))),
            11,
            "cannot read IPBlock blue.10.1.0.0-28 from",
        ),
        (
            "no pods can be listed",
            Box::new(|api| api.fail(Some("status.phase"))),
            11,
            "cannot read pods of namespace ns from",
        ),
    ] {
        let scene = Scene::new("doubt");
        scene.api.set_pod(FakeApi::launcher("target"));
        change(&scene.api);
        let (found, msg) = scene.refused(&Ask::of("target")).await;
        assert!(found == code && msg.contains(text), "{what}: {found} {msg}");
    }
    let scene = Scene::new("requested");
    scene.api.set_pod(FakeApi::launcher("target"));
    let ask = Ask { requested: vec!["10.1.0.5/32".parse().unwrap()], ..Ask::of("target") };
    let (code, msg) = scene.refused(&ask).await;
    assert!(code == 7 && msg.ends_with("has 10.1.0.4/24, fd01::4/64; remove ips from the element"), "{msg}");
    let ask = Ask { config: "red", ..Ask::of("target") };
    assert!(scene.refused(&ask).await.1.contains("is for network blue, this attachment is of network red"));
    scene.api.edit(claim, |claim| claim["metadata"]["ownerReferences"] = Value::Null);
    let mut older = FakeApi::launcher("older");
    older["metadata"]["creationTimestamp"] = json!("2025-01-01T00:00:00Z");
    scene.api.set_pod(older);
    let (code, msg) = scene.refused(&Ask::of("target")).await;
    assert!(code == 11 && msg.contains("serves pod ns/older already"), "{msg}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_caller_that_has_gone_ends_the_lookup() {
    let scene = Scene::new("gone");
    scene.api.set_pod(FakeApi::launcher("target"));
    let lookup = Arc::clone(&scene.lookup);
    let resolve = move || {
        let (ask, calls) = (Ask::of("target"), Cell::new(0));
        let alive = || {
            calls.set(calls.get() + 1);
            if calls.get() < 3 { Ok(()) } else { Err(Error::new(Code::TryAgainLater, "gone")) }
        };
        lookup.resolve(&ClaimQuery {
            pod: &ask.pod,
            key: AttachmentKey { container: "c".to_owned(), interface: "net1".to_owned() },
            config: "blue",
            persistent: true,
            network: "blue",
            requested: &[],
            netns: "",
            caller_alive: &alive,
        })
    };
    let error = tokio::task::spawn_blocking(resolve).await.unwrap().unwrap_err();
    assert_eq!((error.msg.as_str(), scene.api.requests().len()), ("gone", 2));
}
