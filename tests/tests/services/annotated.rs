//! Services that users own and annotate.

use anyhow::{Context as _, Result, ensure};
use lab::{Lab, wait};
use serde_json::{Value, json};

use crate::{
    TIMEOUT,
    cluster::{TestCluster, TestPod, network_status, services},
    start_controller,
};

fn service(name: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Service",
        "metadata": {"name": name, "annotations": {
            "patchbay.dev/service-network": "blue",
            "patchbay.dev/selector": "app in (db, cache), tier!=test",
        }},
        "spec": {"clusterIP": "None", "ports": [{"name": "pg", "port": 5432, "protocol": "TCP"}]}})
}

pub async fn a_service_that_the_user_owns_gets_slices_and_follows_its_annotations(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "annotated").await?;
    let outcome = async {
        cluster.apply(&services(), &service("db")).await?;
        cluster.create_nad("red").await?;
        let status = json!([
            {"name": "annotated/blue", "interface": "net1", "ips": ["192.168.9.1"]},
            {"name": "annotated/blue", "interface": "net2", "ips": ["192.168.9.2"]},
            {"name": "annotated/red", "interface": "net3", "ips": ["192.168.8.1"]},
        ]);
        cluster.create_pod(&TestPod::new("db-0", "db", &[]).status(&status.to_string())).await?;
        cluster.create_pod(&TestPod::new("cache-0", "cache", &["192.168.9.3"])).await?;
        let mut test = TestPod::new("test-0", "db", &["192.168.9.4"]);
        test.labels["tier"] = json!("test");
        cluster.create_pod(&test).await?;
        let both =
            [("192.168.9.1", "db-0", true), ("192.168.9.2", "db-0", true), ("192.168.9.3", "cache-0", true)];
        cluster.wait_for_endpoints("db", &both).await?;
        // An edit of an annotation alone converges.
        let annotate = async |key: &str, value: Value| {
            let patch = json!({"metadata": {"annotations": {format!("patchbay.dev/{key}"): value}}});
            cluster.merge_patch(&services(), "db", &patch).await
        };
        annotate("interface", json!("net2")).await?;
        cluster.wait_for_endpoints("db", &[("192.168.9.2", "db-0", true)]).await?;
        annotate("interface", Value::Null).await?;
        annotate("selector", json!("app=cache")).await?;
        cluster.wait_for_endpoints("db", &[("192.168.9.3", "cache-0", true)]).await?;
        annotate("selector", json!("app=db")).await?;
        annotate("service-network", json!("annotated/red")).await?;
        cluster.wait_for_endpoints("db", &[("192.168.8.1", "db-0", true)]).await?;
        annotate("hostnames", json!("PodName")).await?;
        wait::until(TIMEOUT, "the hostname of the endpoint", || async {
            let slices = cluster.slices("db").await?;
            let endpoints = slices.iter().flat_map(|slice| &slice.endpoints);
            let named = endpoints.filter(|endpoint| endpoint.hostname.as_deref() == Some("db-0"));
            Ok((named.count() == 1).then_some(()))
        })
        .await?;
        // Without the annotations it is no longer ours.
        annotate("service-network", Value::Null).await?;
        annotate("selector", Value::Null).await?;
        wait_without_slices(&cluster, "db").await?;
        cluster.set_network_status("db-0", Some(&network_status("blue", &["192.168.9.9"]))).await
    };
    outcome.await.with_context(|| replica.tail())
}

async fn wait_without_slices(cluster: &TestCluster, service: &str) -> Result<()> {
    wait::until(TIMEOUT, &format!("Service {service} to lose its slices"), || async {
        let slices = cluster.slices(service).await?;
        ensure!(slices.is_empty(), "{slices:?}");
        Ok(Some(()))
    })
    .await
}

pub async fn a_bad_service_of_a_user_loses_its_slices_and_says_what_to_change(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "bad").await?;
    let outcome = async {
        cluster.create_pod(&TestPod::new("db-0", "db", &["192.168.9.1"])).await?;
        for (name, patch, reason, word) in [
            ("selector", json!({"spec": {"selector": {"app": "db"}}}), "SelectorSet", "spec.selector"),
            (
                "annotation",
                json!({"metadata": {"annotations": {"patchbay.dev/selector": "app in db"}}}),
                "BadAnnotation",
                "patchbay.dev/selector",
            ),
            (
                "external",
                json!({"spec": {"type": "ExternalName", "externalName": "example.org", "clusterIP": null, "clusterIPs": null}}),
                "ExternalName",
                "ExternalName",
            ),
        ] {
            // A Service with one family can get a selector.
            let mut object = service(name);
            object["spec"]["ipFamilyPolicy"] = json!("SingleStack");
            cluster.apply(&services(), &object).await?;
            cluster.wait_for_endpoints(name, &[("192.168.9.1", "db-0", true)]).await?;
            cluster.merge_patch(&services(), name, &patch).await?;
            wait_without_slices(&cluster, name).await?;
            let note = cluster.wait_for_event("Service", name, reason).await?;
            ensure!(note.contains(word), "{note}");
        }
        // A cluster IP cannot be added later.
        let mut object = service("cluster-ip");
        object["spec"]["clusterIP"] = Value::Null;
        cluster.apply(&services(), &object).await?;
        let note = cluster.wait_for_event("Service", "cluster-ip", "ClusterIPSet").await?;
        ensure!(note.contains("spec.clusterIP: None"), "{note}");
        wait_without_slices(&cluster, "cluster-ip").await
    };
    outcome.await.with_context(|| replica.tail())
}
