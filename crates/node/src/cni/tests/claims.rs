//! Addresses of claims through the socket.

use std::{os::fd::AsRawFd as _, time::Duration};

use plan::ipam::{AddressInfo, AttachmentKey, Pool};
use tokio::runtime::Handle;

use super::*;
use crate::{
    claims::{AnnouncerTask, PersistentNads},
    ipam::CallerWait,
    pods::OwnPods,
};

impl TestHost {
    pub(super) fn claims(&self) -> ClaimLookup {
        let persistent = PersistentNads::default();
        persistent.set(&[]);
        ClaimLookup {
            client: self.api.client(),
            runtime: Handle::current(),
            pods: OwnPods::unlisted(),
            networks: self.networks.subscribe(),
            persistent,
            ipam: Arc::clone(&self.ipam),
            metrics: crate::claims::Metrics::default(),
        }
    }

    pub(super) fn announcer_task(&self) -> AnnouncerTask {
        let (proc_root, mounts) = (Path::new("/proc"), Path::new("/proc/self/ns/mnt"));
        let metrics = crate::claims::Metrics::default();
        let (client, ipam) = (self.api.client(), Arc::clone(&self.ipam));
        AnnouncerTask::new(self.announcer.clone(), client, ipam, proc_root, mounts, metrics)
    }

    fn set_pool(&self) {
        let ipam: api::ipam::IpamSpec =
            serde_json::from_value(json!({"subnets": ["10.1.0.0/24", "fd01::/64"]})).unwrap();
        let pool = Pool::new("blue", &ipam, |family| family.block_length(&ipam), true);
        self.networks.send_modify(|networks| {
            Arc::make_mut(networks).by_name.get_mut("blue").unwrap().ipam = Some(Arc::new(pool));
        });
    }

    /// Attaches a launcher as multus does.
    async fn add(&self, pod: &str, namespace: &Namespace) -> Value {
        let (exit, value) = self.call(&of_launcher("ADD", pod, namespace, json!({})), Some(namespace)).await;
        assert_eq!(exit, 0, "{value}");
        value
    }

    async fn del(&self, pod: &str, namespace: &Namespace) {
        let (exit, value) = self.call(&of_launcher("DEL", pod, namespace, json!({})), Some(namespace)).await;
        assert_eq!(exit, 0, "{value}");
    }

    /// Waits until the link of a pod is quiet or not.
    async fn quiet(&self, namespace: &Namespace, quiet: bool) {
        let changed = async {
            while namespace.ip("link show net1").unwrap().contains("NOARP") != quiet {
                sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(Duration::from_secs(10), changed).await.expect("the link does not change");
    }
}

/// A call for interface `net1` of a launcher on a network with persistent addresses.
fn of_launcher(command: &str, pod: &str, namespace: &Namespace, changes: Value) -> Request {
    let mut config = json!({"allowPersistentIPs": true, "ipam": {"type": "patchbay-ipam"}});
    for (key, value) in changes.as_object().into_iter().flatten() {
        config[key] = value.clone();
    }
    Request {
        args: format!("IgnoreUnknown=1;K8S_POD_NAMESPACE=ns;K8S_POD_NAME={pod};K8S_POD_UID=uid-{pod}"),
        netns: format!("/proc/{}/fd/{}", std::process::id(), namespace.0.as_raw_fd()),
        ..request(command, pod, config)
    }
}

fn addresses(result: &Value) -> [&str; 2] {
    [&result["ips"][0], &result["ips"][1]].map(|ip| ip["address"].as_str().unwrap())
}

const ADDRESSES: [&str; 2] = ["10.1.0.4/24", "fd01::4/64"];

#[test]
fn a_restarted_machine_keeps_addresses_and_mac() {
    on_server("claim-restart", async |host| {
        host.set_pool();
        let mac = attachment::claim_mac("claim-uid").to_string();
        for launcher in ["first", "second"] {
            host.api.set_pod(FakeApi::launcher(launcher));
            let pod = Namespace::new();
            let result = host.add(launcher, &pod).await;
            assert_eq!(addresses(&result), ADDRESSES);
            assert_eq!(result["interfaces"][1]["mac"], mac);
            let shown = pod.ip("address show net1").unwrap();
            assert!(shown.contains(ADDRESSES[0]) && shown.contains(ADDRESSES[1]), "{shown}");
            assert!(!shown.contains("NOARP") && shown.contains(&mac), "{shown}");
            assert_eq!(host.add(launcher, &pod).await, result);
            // CHECK agrees, also if the earlier result has no MAC address.
            let mut without = result.clone();
            without["interfaces"][1].as_object_mut().unwrap().remove("mac");
            for previous in [&result, &without] {
                let check = of_launcher("CHECK", launcher, &pod, json!({"prevResult": previous}));
                let (exit, value) = host.call(&check, Some(&pod)).await;
                assert_eq!(exit, 0, "{value}");
            }
            for _ in 0..2 {
                host.del(launcher, &pod).await;
            }
            assert!(host.ipam.leases().is_empty());
            host.api.delete_pod(launcher);
        }
    });
}

#[test]
fn a_migration_target_is_quiet_until_the_source_has_ended() {
    on_server("claim-migration", async |host| {
        host.set_pool();
        let (source, target) = (Namespace::new(), Namespace::new());
        host.api.set_pod(FakeApi::launcher("source"));
        host.add("source", &source).await;
        host.api.set_pod(FakeApi::launcher("target"));
        let result = host.add("target", &target).await;
        assert_eq!(addresses(&result), ADDRESSES);
        // Two pods of one node, with different MAC addresses.
        assert_eq!(host.ipam.leases().len(), 2);
        let own = attachment::mac("target", "net1", "uid-blue").to_string();
        assert_eq!(result["interfaces"][1]["mac"], own);
        host.quiet(&target, true).await;
        assert_eq!(host.add("target", &target).await, result);

        host.del("source", &source).await;
        assert_eq!(host.ipam.leases().len(), 1);
        assert!(target.ip("link show net1").unwrap().contains("NOARP"), "the source is still live");
        host.api.delete_pod("source");
        host.quiet(&target, false).await;
        // A repeated ADD after that changes nothing.
        assert_eq!(host.add("target", &target).await, result);
        host.quiet(&target, false).await;
        host.del("target", &target).await;
        assert!(host.ipam.leases().is_empty() && host.announcer.waiting().is_empty());
    });
}

#[test]
fn a_failed_migration_leaves_the_source_as_it_is() {
    on_server("claim-failed", async |host| {
        host.set_pool();
        let (source, target) = (Namespace::new(), Namespace::new());
        host.api.set_pod(FakeApi::launcher("source"));
        let result = host.add("source", &source).await;
        host.api.set_pod(FakeApi::launcher("target"));
        host.add("target", &target).await;
        let key = AttachmentKey { container: "target".to_owned(), interface: "net1".to_owned() };
        assert_eq!(host.announcer.waiting().into_keys().collect::<Vec<_>>(), [key]);
        host.del("target", &target).await;
        host.api.delete_pod("target");
        assert!(host.announcer.waiting().is_empty());
        assert_eq!(host.add("source", &source).await, result);
        assert!(!source.ip("link show net1").unwrap().contains("NOARP"));
    });
}

#[test]
fn a_requested_mac_wins_and_a_refused_claim_leaves_nothing() {
    on_server("claim-mac", async |host| {
        host.set_pool();
        let pod = Namespace::new();
        host.api.set_pod(FakeApi::launcher("vm"));
        let requested = json!({"runtimeConfig": {"mac": "02:00:00:00:00:77"}});
        let (exit, value) = host.call(&of_launcher("ADD", "vm", &pod, requested), Some(&pod)).await;
        assert_eq!((exit, &value["interfaces"][1]["mac"]), (0, &json!("02:00:00:00:00:77")));
        host.del("vm", &pod).await;
        host.api.remove("ipamclaims/vm1.blue");
        let (exit, value) = host.call(&of_launcher("ADD", "vm", &pod, json!({})), Some(&pod)).await;
        assert_eq!((exit, &value["code"]), (1, &json!(11)), "{value}");
        assert!(host.ipam.leases().is_empty());
        assert_eq!(pod.links(), 1);
    });
}

#[test]
fn patchbay_ipam_serves_claims_to_other_plugins() {
    on_server("claim-delegated", async |host| {
        host.set_pool();
        let (pod, requests) = (Namespace::new(), |command: &str, persistent: bool| {
            let config = json!({
                "cniVersion": "1.1.0", "name": "blue", "type": "macvlan", "allowPersistentIPs": persistent,
                "ipam": {"type": "patchbay-ipam", "network": "blue"},
            });
            let (plugin, stdin) = ("patchbay-ipam".to_owned(), config.to_string().into_bytes());
            Request { plugin, stdin, ..of_launcher(command, "vm", &Namespace::new(), json!({})) }
        });
        host.api.set_pod(FakeApi::launcher("vm"));
        let (exit, value) = host.call(&requests("ADD", true), Some(&pod)).await;
        assert_eq!((exit, addresses(&value)), (0, ADDRESSES));
        let (exit, value) = host.call(&requests("DEL", true), Some(&pod)).await;
        assert_eq!(exit, 0, "{value}");
        assert!(host.ipam.leases().is_empty());
        // A network without persistent addresses does not ask the API server.
        host.api.requests();
        host.ipam.hold("uid-blue", "10.1.0.16/28");
        host.ipam.hold("uid-blue", "fd01::100/120");
        let (exit, value) = host.call(&requests("ADD", false), Some(&pod)).await;
        assert_eq!((exit, addresses(&value)), (0, ["10.1.0.16/24", "fd01::100/64"]));
        assert_eq!(host.api.requests(), [""; 0]);
    });
}

/// The controller gives an address that no report lists to another claim, so an ADD whose daemon dies before its report must
/// have failed.
#[test]
fn an_add_succeeds_only_once_the_report_with_its_addresses_is_stored() {
    on_server("claim-report", async |host| {
        host.set_pool();
        host.ipam.record_complete();
        let pod = Namespace::new();
        host.api.set_pod(FakeApi::launcher("vm"));
        host.add("vm", &pod).await;
        let lease = host.ipam.leases().remove(0);
        let listed = host.ipam.published();
        // The stored report lists the address, but the next one, without it, may be on its way.
        assert!(host.ipam.release(&lease.key));
        let serve = || {
            let infos =
                lease.addresses.iter().map(|address| AddressInfo { net: (*address).into(), gateway: None });
            let caller =
                CallerWait { deadline: Instant::now(), caller_alive: &|| Ok(()), network_open: &|| Ok(()) };
            host.ipam.serve("blue", lease.clone(), infos.collect(), &caller)
        };
        for _ in 0..2 {
            let error = serve().expect_err("the report is not stored");
            assert_eq!(error.code, Code::TryAgainLater);
            assert!(error.msg.contains("does not list the addresses of the IPAMClaim"), "{error:?}");
        }
        while host.ipam.published() == listed {
            tokio::task::yield_now().await;
        }
        assert_eq!(serve().unwrap().lease, lease);
    });
}
