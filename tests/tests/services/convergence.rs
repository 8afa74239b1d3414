//! Whatever happens to a service, its slices end as a fresh create would.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use lab::{Lab, wait};
use serde_json::{Value, json};

use crate::{
    TIMEOUT,
    cluster::{Endpoints, TestCluster, TestPod, network_services, services, slices},
    start_controller,
};

/// The parts of all slices that must be equal after any history.
fn content(slices: &[EndpointSlice]) -> Result<BTreeSet<String>> {
    let part = |slice: &EndpointSlice| {
        let mut labels = slice.metadata.labels.clone().unwrap_or_default();
        labels.remove("kubernetes.io/service-name");
        let network =
            slice.metadata.annotations.as_ref().and_then(|all| all.get("patchbay.dev/service-network"));
        let part = json!([labels, network, slice.address_type, slice.ports, slice.endpoints]);
        anyhow::Ok(part.to_string())
    };
    slices.iter().map(part).collect()
}

pub async fn edits_of_the_spec_end_as_a_fresh_create_would(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "edits").await?;
    let outcome = async {
        cluster.create_nad("red").await?;
        let status = |blue: &str, red: &str| {
            json!([
                {"name": "edits/blue", "interface": "net1", "ips": [blue]},
                {"name": "edits/red", "interface": "net2", "ips": [red]},
            ])
            .to_string()
        };
        for (name, app, number) in [("db-0", "db", 1), ("db-1", "db", 2), ("web-0", "web", 3)] {
            let mut pod = TestPod::new(name, app, &[])
                .status(&status(&format!("192.168.9.{number}"), &format!("192.168.8.{number}")));
            pod.spec = json!({"containers": [{"name": "c", "image": "none",
                "ports": [{"name": "data", "containerPort": 7000 + number}]}]});
            cluster.create_pod(&pod).await?;
        }
        cluster.create_service("edited", TestCluster::service_spec("db")).await?;
        cluster.wait_for_condition("edited", "Ready", "True", "Ready").await?;
        let last = json!({
            "network": "red", "selector": {"app": "web"}, "hostnames": "PodName", "interface": "net2",
            "ports": [{"name": "a", "port": 1, "targetPort": "data"}, {"name": "b", "port": 2, "protocol": "SCTP", "appProtocol": "http"}],
        });
        for (field, value) in last.as_object().context("an object")? {
            // A selector would be merged.
            let value = if field == "selector" { json!({"app": "web"}) } else { value.clone() };
            cluster.merge_patch(&network_services(), "edited", &json!({"spec": {field: value}})).await?;
        }
        cluster
            .merge_patch(
                &network_services(),
                "edited",
                &json!({"metadata": {"labels": {"team": "web", "more": "1"}}}),
            )
            .await?;
        cluster.create_service("fresh", last).await?;
        cluster
            .merge_patch(
                &network_services(),
                "fresh",
                &json!({"metadata": {"labels": {"team": "web", "more": "1"}}}),
            )
            .await?;
        cluster.wait_for_endpoints("fresh", &[("192.168.8.3", "web-0", true)]).await?;
        wait::until(TIMEOUT, "the edited service to be as the fresh one", || async {
            let (edited, fresh) = (cluster.slices("edited").await?, cluster.slices("fresh").await?);
            ensure!(
                content(&edited)? == content(&fresh)?,
                "{:#?}\n{:#?}",
                content(&edited)?,
                content(&fresh)?
            );
            let [edited, fresh] =
                [cluster.get(&services(), "edited").await?, cluster.get(&services(), "fresh").await?];
            let (edited, fresh) = (edited.context("edited")?, fresh.context("fresh")?);
            ensure!(edited["spec"] == fresh["spec"], "{edited:#}\n{fresh:#}");
            ensure!(edited["metadata"]["labels"] == fresh["metadata"]["labels"], "{edited:#}\n{fresh:#}");
            Ok(Some(()))
        })
        .await
    };
    outcome.await.with_context(|| replica.tail())
}

pub async fn foreign_changes_of_slices_and_services_are_repaired(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "repair").await?;
    let outcome = async {
        cluster.create_pod(&TestPod::new("db-0", "db", &["192.168.9.1"])).await?;
        cluster.create_service("db", TestCluster::service_spec("db")).await?;
        cluster.wait_for_condition("db", "Ready", "True", "Ready").await?;
        let before = content(&cluster.slices("db").await?)?;
        let restored = || {
            let (cluster, before) = (&cluster, &before);
            wait::until(TIMEOUT, "the slices to be restored", async || {
                let slices = cluster.slices("db").await?;
                ensure!(content(&slices)? == *before, "{slices:#?}");
                Ok(Some(()))
            })
        };
        let ipv4 = async || -> Result<String> {
            let slices = cluster.slices("db").await?;
            let slice =
                slices.iter().find(|slice| slice.address_type == "IPv4").context("a slice of IPv4")?;
            slice.metadata.name.clone().context("metadata.name")
        };
        let damages: [Value; 5] = [
            json!({"endpoints": [{"addresses": ["10.0.0.66"], "conditions": {"ready": true}}]}),
            json!({"endpoints": []}),
            json!({"ports": [{"name": "evil", "port": 1, "protocol": "TCP"}]}),
            json!({"metadata": {"labels": {"team": null}}}),
            json!({"metadata": {"annotations": {"patchbay.dev/service-network": null}}}),
        ];
        for damage in damages {
            cluster.merge_patch(&slices(), &ipv4().await?, &damage).await?;
            restored().await.with_context(|| damage.to_string())?;
        }
        // Slices and Services that are deleted come back; a slice that leaves our management is replaced.
        cluster.delete(&slices(), &ipv4().await?).await?;
        restored().await.context("a deleted slice")?;
        let name = ipv4().await?;
        let leave = json!({"metadata": {"labels": {"endpointslice.kubernetes.io/managed-by": "user"}}});
        cluster.merge_patch(&slices(), &name, &leave).await?;
        restored().await.context("a slice of another manager")?;
        cluster.wait_for_condition("db", "ForeignEndpoints", "True", "ForeignEndpoints").await?;
        cluster.delete(&slices(), &name).await?;
        cluster.wait_for_condition("db", "ForeignEndpoints", "False", "None").await?;
        cluster.delete(&services(), "db").await?;
        restored().await.context("a deleted Service")?;
        // The selector would make Kubernetes publish primary addresses.
        let patch =
            json!({"metadata": {"labels": {"team": "other"}}, "spec": {"publishNotReadyAddresses": true}});
        cluster.merge_patch(&services(), "db", &patch).await?;
        wait::until(TIMEOUT, "the Service to be restored", || async {
            let service = cluster.get(&services(), "db").await?.context("the Service")?;
            ensure!(service["metadata"]["labels"] == json!({"team": "db"}), "{service:#}");
            ensure!(
                service["spec"].get("publishNotReadyAddresses").is_none_or(|it| it == false),
                "{service:#}"
            );
            Ok(Some(()))
        })
        .await?;
        restored().await.context("a changed Service")
    };
    outcome.await.with_context(|| replica.tail())
}

pub async fn foreign_slices_and_endpoints_are_reported(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "foreign").await?;
    let outcome = async {
        cluster.create_service("db", TestCluster::service_spec("db")).await?;
        cluster.wait_for_condition("db", "ForeignEndpoints", "False", "None").await?;
        let slice = json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": {"name": "db-left", "labels": {"kubernetes.io/service-name": "db", "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io"}},
            "endpoints": [{"addresses": ["10.244.0.9"]}]});
        cluster.create(&slices(), &slice).await?;
        let found = cluster.wait_for_condition("db", "ForeignEndpoints", "True", "ForeignEndpoints").await?;
        let message = found["message"].as_str().unwrap_or_default();
        ensure!(
            message.contains("db-left") && message.contains("endpointslice-controller.k8s.io"),
            "{message}"
        );
        cluster.wait_for_event("NetworkService", "db", "ForeignEndpoints").await?;
        let endpoints = crate::cluster::resource("", "v1", "Endpoints", "endpoints");
        let object = json!({"apiVersion": "v1", "kind": "Endpoints", "metadata": {"name": "db", "labels": {"endpointslice.kubernetes.io/skip-mirror": "true"}}, "subsets": []});
        cluster.create(&endpoints, &object).await?;
        wait::until(TIMEOUT, "the condition to name the Endpoints", || async {
            let found =
                cluster.wait_for_condition("db", "ForeignEndpoints", "True", "ForeignEndpoints").await?;
            Ok(found["message"].as_str().is_some_and(|it| it.contains("Endpoints db")).then_some(()))
        })
        .await?;
        cluster.delete(&slices(), "db-left").await?;
        cluster.delete(&endpoints, "db").await?;
        cluster.wait_for_condition("db", "ForeignEndpoints", "False", "None").await.map(drop)
    };
    outcome.await.with_context(|| replica.tail())
}

const MANY: usize = 1050;

pub async fn a_thousand_endpoints_are_published_and_a_single_change_writes_one_slice(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "many").await?;
    let outcome = async {
        cluster.create_service("db", TestCluster::service_spec("db")).await?;
        let address = |number: usize| format!("192.168.{}.{}", number / 250, 1 + number % 250);
        let create = |number: usize| {
            let cluster = cluster.clone();
            async move {
                cluster
                    .create_pod(&TestPod::new(&format!("db-{number}"), "db", &[&address(number)]))
                    .await
                    .map(drop)
            }
        };
        stream::iter(0..MANY).map(create).buffer_unordered(16).try_collect::<Vec<()>>().await?;
        let all =
            (0..MANY).map(|number| anyhow::Ok((address(number).parse()?, format!("db-{number}"), true)));
        let mut all: Endpoints = all.collect::<Result<_>>()?;
        cluster.wait_for_model(TIMEOUT, "db", &all).await?;
        let slices = cluster.slices("db").await?;
        ensure!(slices.iter().all(|slice| slice.endpoints.len() <= 100), "a slice has too many endpoints");
        println!("{MANY} endpoints in {} slices", slices.len());
        // At rest nothing is written; the counts follow within 5 s.
        wait::until(TIMEOUT, "the counts", || async {
            let object = cluster.get(&network_services(), "db").await?.context("the NetworkService")?;
            Ok((object["status"]["endpoints"]["ipv4"]["ready"] == MANY).then_some(()))
        })
        .await?;
        let offset = lab.audit_offset()?;
        cluster.set_ready("db-500", false).await?;
        all.remove(&(address(500).parse()?, "db-500".to_owned(), true));
        all.insert((address(500).parse()?, "db-500".to_owned(), false));
        cluster.wait_for_model(TIMEOUT, "db", &all).await?;
        wait::until(TIMEOUT, "the counts", || async {
            let object = cluster.get(&network_services(), "db").await?.context("the NetworkService")?;
            Ok((object["status"]["endpoints"]["ipv4"]["ready"] == MANY - 1).then_some(()))
        })
        .await?;
        let mut writes = TestCluster::controller_writes(&lab, offset)?;
        writes.retain(|write| write.contains(&format!(" {}/", cluster.namespace)));
        let of_slices = writes.iter().filter(|write| write.contains("endpointslices")).count();
        let of_status = writes.iter().filter(|write| write.contains("networkservices/status")).count();
        ensure!((of_slices, of_status, writes.len()) == (1, 1, 2), "{writes:?}");
        Ok(())
    };
    outcome.await.with_context(|| replica.tail())
}
