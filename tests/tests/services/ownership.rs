//! Whose Service and slices are whose.

use anyhow::{Context as _, Result, ensure};
use kube::{
    Api,
    api::{DeleteParams, DynamicObject},
};
use lab::{Lab, wait};
use serde_json::json;

use crate::{
    TIMEOUT,
    cluster::{TestCluster, TestPod, network_services, resource, services},
    start_controller,
};

pub async fn a_foreign_service_is_never_taken_over_unless_it_says_so(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "taken").await?;
    let outcome = async {
        cluster.create_pod(&TestPod::new("db-0", "db", &["192.168.9.1"])).await?;
        let foreign = |name: &str| {
            json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "labels": {"of": "user"}},
                "spec": {"clusterIP": "None", "ports": [{"name": "own", "port": 1, "protocol": "TCP"}]}})
        };
        for name in ["adopted", "replaced"] {
            cluster.apply(&services(), &foreign(name)).await?;
        }
        let uid = cluster.create_service("adopted", TestCluster::service_spec("db")).await?;
        cluster.create_service("replaced", TestCluster::service_spec("db")).await?;
        for name in ["adopted", "replaced"] {
            let found = cluster.wait_for_condition(name, "Ready", "False", "ServiceTaken").await?;
            println!("{}", found["message"]);
            cluster.wait_for_event("NetworkService", name, "ServiceTaken").await?;
            let service = cluster.get(&services(), name).await?.context("the Service")?;
            ensure!(service["metadata"].get("ownerReferences").is_none(), "{service:#}");
            ensure!(service["spec"]["ports"][0]["name"] == "own", "{service:#}");
            ensure!(cluster.slices(name).await?.is_empty(), "{name} has slices");
        }
        // The other Service goes: ours is created.
        cluster.delete(&services(), "replaced").await?;
        cluster.wait_for_endpoints("replaced", &[("192.168.9.1", "db-0", true)]).await?;
        cluster.wait_for_condition("replaced", "Ready", "True", "Ready").await?;
        // The annotation hands the Service over: it is the same object afterwards.
        let before = cluster.get(&services(), "adopted").await?.context("the Service")?;
        let adopt = |uid: &str| json!({"metadata": {"annotations": {"patchbay.dev/adopt": uid}}});
        cluster.merge_patch(&services(), "adopted", &adopt("another-uid")).await?;
        cluster.merge_patch(&services(), "adopted", &adopt(&uid)).await?;
        cluster.wait_for_endpoints("adopted", &[("192.168.9.1", "db-0", true)]).await?;
        cluster.wait_for_condition("adopted", "Ready", "True", "Ready").await?;
        let service = cluster.get(&services(), "adopted").await?.context("the Service")?;
        ensure!(service["metadata"]["uid"] == before["metadata"]["uid"], "the Service was created again");
        ensure!(service["metadata"]["ownerReferences"][0]["uid"] == uid.as_str(), "{service:#}");
        ensure!(service["spec"]["ports"][0]["name"] == "pg", "{service:#}");
        Ok(())
    };
    outcome.await.with_context(|| replica.tail())
}

pub async fn a_deleted_networkservice_takes_its_service_along(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "deleted").await?;
    let outcome = async {
        cluster.create_pod(&TestPod::new("db-0", "db", &["192.168.9.1"])).await?;
        let first = cluster.create_service("db", TestCluster::service_spec("db")).await?;
        cluster.wait_for_condition("db", "Ready", "True", "Ready").await?;
        // Created again at once, before the garbage collector has deleted the old Service.
        cluster.delete(&network_services(), "db").await?;
        let second = cluster.create_service("db", TestCluster::service_spec("db")).await?;
        ensure!(first != second);
        wait::until(TIMEOUT, "the Service of the new NetworkService", || async {
            let service = cluster.get(&services(), "db").await?;
            Ok(service.filter(|it| it["metadata"]["ownerReferences"][0]["uid"] == second.as_str()))
        })
        .await?;
        cluster.wait_for_endpoints("db", &[("192.168.9.1", "db-0", true)]).await?;
        cluster.wait_for_condition("db", "Ready", "True", "Ready").await?;
        cluster.delete(&network_services(), "db").await?;
        cluster.wait_until_gone(&services(), "db").await?;
        cluster.wait_for_endpoints("db", &[]).await
    };
    outcome.await.with_context(|| replica.tail())
}

pub async fn a_deleted_namespace_takes_its_services_along(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "namespaces").await?;
    let outcome = async {
        let tenant = cluster.sibling("tenant").await?;
        tenant.create_pod(&TestPod::new("db-0", "db", &["192.168.9.1"])).await?;
        for number in 0..5 {
            tenant.create_service(&format!("db-{number}"), TestCluster::service_spec("db")).await?;
        }
        tenant.wait_for_condition("db-4", "Ready", "True", "Ready").await?;
        let namespaces: Api<DynamicObject> =
            Api::all_with(cluster.client.clone(), &resource("", "v1", "Namespace", "namespaces"));
        namespaces.delete("tenant", &DeleteParams::default()).await?;
        wait::until(TIMEOUT, "the namespace to be deleted", || async {
            Ok(namespaces.get_opt("tenant").await?.is_none().then_some(()))
        })
        .await?;
        // Another namespace is not affected.
        cluster.create_pod(&TestPod::new("db-0", "db", &["192.168.9.1"])).await?;
        cluster.create_service("db", TestCluster::service_spec("db")).await?;
        cluster.wait_for_condition("db", "Ready", "True", "Ready").await.map(drop)
    };
    outcome.await.with_context(|| replica.tail())
}
