//! What users see and may do.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use e2e::quiet::{is_controller_write, wait_until_quiet};
use kube::{
    Api, Client,
    api::{DynamicObject, ListParams, PostParams},
};
use lab::{Lab, wait};
use serde_json::{Value, json};

use crate::{
    TIMEOUT,
    cluster::{TestCluster, TestPod, network_services, pods, resource, slices},
    start_controller,
};

pub async fn the_nad_kind_may_arrive_later(lab: Lab) -> Result<()> {
    let cluster = TestCluster::without_nads(&lab, "late").await?;
    let replica = cluster.start_leader(&lab).await?;
    let outcome = async {
        cluster.create_pod(&TestPod::new("db-0", "db", &["192.168.9.1"])).await?;
        cluster.create_service("db", TestCluster::service_spec("db")).await?;
        let found = cluster.wait_for_condition("db", "Ready", "False", "NetworkNotFound").await?;
        ensure!(found["message"].as_str().is_some_and(|it| it.contains("kind")), "{found}");
        cluster.install_nad_crd().await?;
        wait::until(TIMEOUT, "the message to name the NAD", || async {
            let found = cluster.wait_for_condition("db", "Ready", "False", "NetworkNotFound").await?;
            Ok(found["message"].as_str().is_some_and(|it| it.contains("late/blue")).then_some(()))
        })
        .await?;
        cluster.create_nad("blue").await?;
        cluster.wait_for_condition("db", "Ready", "True", "Ready").await?;
        cluster.wait_for_endpoints("db", &[("192.168.9.1", "db-0", true)]).await?;
        cluster.delete(&network_services(), "db").await?;
        cluster.wait_until_gone(&crate::cluster::services(), "db").await
    };
    outcome.await.with_context(|| replica.tail())
}

fn bridge_networks() -> kube::core::ApiResource {
    resource("patchbay.dev", "v1alpha1", "BridgeNetwork", "bridgenetworks")
}

/// Runs before other tests leave NetworkServices behind.
pub async fn the_watch_of_pods_switches_without_losing_users(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "switch").await?;
    let outcome = async {
        let networks: Api<DynamicObject> = Api::all_with(cluster.client.clone(), &bridge_networks());
        let network = json!({"apiVersion": "patchbay.dev/v1alpha1", "kind": "BridgeNetwork", "metadata": {"name": "switch"},
            "spec": {"attachment": {"namespaces": ["switch"]}, "nodeSelector": {"matchLabels": {"none": "none"}}}});
        wait::until(TIMEOUT, "the webhook to admit a network", || async {
            networks.create(&PostParams::default(), &serde_json::from_value(network.clone())?).await?;
            Ok(Some(()))
        })
        .await?;
        let users = async |count: i64| {
            wait::until(TIMEOUT, &format!("{count} users"), || async {
                let network = networks.get("switch").await?;
                ensure!(network.data["status"]["users"]["count"] == count, "{:#}", network.data["status"]);
                Ok(Some(()))
            })
            .await
        };
        let user = |name: &str| {
            let annotations = json!({"k8s.v1.cni.cncf.io/networks": "switch",
                "k8s.v1.cni.cncf.io/network-status": crate::cluster::network_status("switch", &["192.168.9.1"])});
            json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "annotations": annotations, "labels": {"app": "db"}},
                "spec": {"nodeName": "node-a", "containers": [{"name": "c", "image": "none"}], "tolerations": [{"operator": "Exists"}]}})
        };
        cluster.create(&pods(), &user("first")).await?;
        users(1).await?;
        let offset = wait_until_quiet(&lab, Duration::from_secs(2), is_controller_write).await?;
        let mut spec = TestCluster::service_spec("db");
        spec["network"] = json!("switch");
        cluster.create_service("db", spec).await?;
        cluster.wait_for_endpoints("db", &[("192.168.9.1", "first", false)]).await?;
        let writes = TestCluster::controller_writes(&lab, offset)?;
        ensure!(!writes.iter().any(|write| write.contains("bridgenetworks")), "{writes:?}");
        // The new watch feeds the index of users.
        cluster.create(&pods(), &user("second")).await?;
        users(2).await?;
        cluster.delete(&pods(), "first").await?;
        users(1).await?;
        cluster.delete(&pods(), "second").await?;
        networks.delete("switch", &kube::api::DeleteParams::default()).await?;
        Ok(())
    };
    outcome.await.with_context(|| replica.tail())
}

async fn client_of(lab: &Lab, user: &str) -> Result<Client> {
    let mut config = lab.client_config().await?;
    config.auth_info.impersonate = Some(user.to_owned());
    Ok(Client::try_from(config)?)
}

pub async fn a_user_with_edit_creates_networkservices_and_cannot_write_slices(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "rights").await?;
    let outcome = async {
        for (user, role) in [("viewer", "view"), ("editor", "edit"), ("owner", "admin")] {
            let binding = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": {"name": user},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
                "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}]});
            let bindings = resource("rbac.authorization.k8s.io", "v1", "RoleBinding", "rolebindings");
            cluster.apply(&bindings, &binding).await?;
        }
        let as_user =
            async |user: &str| -> Result<TestCluster> { Ok(cluster.as_user(client_of(&lab, user).await?)) };
        let editor = as_user("editor").await?;
        // The control plane aggregates roles with a delay.
        wait::until(TIMEOUT, "the editor to create a NetworkService", || async {
            editor.create_service("edited", TestCluster::service_spec("db")).await.map(Some)
        })
        .await?;
        as_user("owner").await?.create_service("owned", TestCluster::service_spec("db")).await?;
        let viewer = as_user("viewer").await?;
        ensure!(viewer.api(&network_services()).list(&ListParams::default()).await?.items.len() == 2);
        ensure!(viewer.create_service("viewed", TestCluster::service_spec("db")).await.is_err());
        cluster.create_pod(&TestPod::new("db-0", "db", &["192.168.9.1"])).await?;
        cluster.wait_for_endpoints("edited", &[("192.168.9.1", "db-0", true)]).await?;
        let slice = json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": {"name": "own"}, "endpoints": []});
        for user in ["editor", "owner"] {
            let denied = as_user(user).await?.create(&slices(), &slice).await;
            ensure!(
                matches!(&denied, Err(kube::Error::Api(status)) if status.code == 403),
                "{user}: {denied:?}"
            );
        }
        let status = json!({"status": {"observedGeneration": 7}});
        let patched = editor
            .api(&network_services())
            .patch_status("edited", &kube::api::PatchParams::default(), &kube::api::Patch::Merge(&status))
            .await;
        ensure!(matches!(&patched, Err(kube::Error::Api(status)) if status.code == 403), "{patched:?}");
        Ok(())
    };
    outcome.await.with_context(|| replica.tail())
}

pub async fn invalid_specs_are_rejected_with_a_reason(lab: Lab) -> Result<()> {
    let cluster = TestCluster::new(&lab, "invalid").await?;
    let with = |field: &str, value: Value| {
        let mut spec = TestCluster::service_spec("db");
        spec[field] = value;
        spec
    };
    let port = |name: &str, number: i64| json!({"name": name, "port": number});
    let many: Vec<Value> = (1..=101).map(|number| port(&format!("p{number}"), number)).collect();
    let rows = [
        ("1db", TestCluster::service_spec("db"), "name of a Service"),
        ("a.dot", TestCluster::service_spec("db"), "name of a Service"),
        ("db", with("type", json!("VIP")), "spec.type"),
        ("db", with("selector", json!({})), "spec.selector is empty"),
        ("db", with("selector", json!({"a b": "c"})), "label key"),
        ("db", with("ports", json!(many)), "at most 100"),
        ("db", with("ports", json!([port("a", 1), port("a", 2)])), "same name"),
        ("db", with("ports", json!([port("a", 1), port("b", 1)])), "same number and protocol"),
        ("db", with("ports", json!([{"port": 1}, {"port": 2}])), "need a name"),
        ("db", with("ports", json!([port("a", 0)])), "spec.ports[0].port"),
        ("db", with("ports", json!([port("a", 65536)])), "spec.ports[0].port"),
        ("db", with("ports", json!([{"port": 1, "targetPort": 70000}])), "targetPort"),
        ("db", with("ports", json!([{"port": 1, "protocol": "ICMP"}])), "spec.ports[0].protocol"),
        ("db", with("network", json!("")), "spec.network"),
        ("db", with("network", json!("a/b/c")), "spec.network"),
        ("db", with("network", json!("/b")), "spec.network"),
        ("db", with("network", json!("Blue")), "spec.network"),
        ("db", with("interface", json!("sixteen-bytes-xx")), "spec.interface"),
        ("db", with("interface", json!("a/b")), "spec.interface"),
        ("db", with("interface", json!("lo")), "no interface"),
        ("db", with("hostnames", json!("Any")), "spec.hostnames"),
    ];
    for (name, spec, expected) in rows {
        let error = cluster.create_service(name, spec.clone()).await.err();
        let error = error.with_context(|| format!("{name} {spec} was admitted"))?;
        let error = format!("{error:#}");
        ensure!(error.contains(expected), "{name} {spec}: {error}");
    }
    let valid = json!({"type": "Headless", "network": "other/blue.net", "selector": {"example.org/app": "db"}, "interface": "net1",
        "hostnames": "PodName", "publishNotReadyAddresses": true,
        "ports": [{"name": "a", "port": 1}, {"name": "b", "port": 1, "protocol": "UDP", "targetPort": "dns", "appProtocol": "example.org/x"}]});
    cluster.create_service("valid", valid).await.map(drop)
}

pub async fn kubectl_shows_and_awaits_networkservices(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "kubectl").await?;
    let outcome = async {
        cluster.create_service("db", TestCluster::service_spec("db")).await?;
        cluster.wait_for_condition("db", "Ready", "False", "NoPods").await?;
        cluster.create_pod(&TestPod::new("db-0", "db", &["192.168.9.1", "fd00:9::1"])).await?;
        lab.kubectl(&["-n", "kubectl", "wait", "--for=condition=Ready", "nsvc/db", "--timeout=60s"])?;
        wait::until(TIMEOUT, "the counts", || async {
            let shown = lab.kubectl(&["-n", "kubectl", "get", "nsvc", "db"])?;
            ensure!(["NETWORK", "blue", "2/2", "Ready"].iter().all(|word| shown.contains(word)), "{shown}");
            println!("{shown}");
            Ok(Some(()))
        })
        .await?;
        let object = cluster.get(&network_services(), "db").await?.context("the NetworkService")?;
        let counts =
            json!({"ipv4": {"ready": 1, "total": 1}, "ipv6": {"ready": 1, "total": 1}, "summary": "2/2"});
        ensure!(object["status"]["endpoints"] == counts, "{:#}", object["status"]);
        ensure!(object["status"]["observedGeneration"] == object["metadata"]["generation"], "{object:#}");
        Ok(())
    };
    outcome.await.with_context(|| replica.tail())
}
