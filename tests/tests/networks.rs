//! BridgeNetworks on the cluster's side: the controller as a real process against a real API server, with Nodes and
//! NodeNetworks written by the test in place of kubelets and daemons.
#![allow(clippy::print_stdout, reason = "a test without the standard harness prints what it measured")]

#[path = "networks/admission.rs"]
mod admission;
#[path = "networks/clashes.rs"]
mod clashes;
#[path = "networks/cluster.rs"]
mod cluster;
#[path = "networks/counting.rs"]
mod counting;
#[path = "networks/crashes.rs"]
mod crashes;
#[path = "networks/history.rs"]
mod history;
#[path = "networks/keeping.rs"]
mod keeping;
#[path = "networks/races.rs"]
mod races;
#[path = "networks/users.rs"]
mod users;

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use admission::{
    what_a_user_makes_is_let_in, while_a_network_goes_no_kind_begins_to_use_it,
    without_a_controller_pods_are_made_and_networks_are_not,
};
use anyhow::{Context as _, Result, ensure};
use clashes::{
    a_node_that_carries_less_joins_a_used_overlay, of_two_networks_made_at_once_one_wins,
    one_uplink_and_one_vni_serve_one_network_on_a_node,
};
use cluster::{Cluster, condition};
use counting::{
    people_see_how_many_use_it_and_the_first_ten, the_finished_hold_nothing,
    what_a_counted_object_makes_is_not_counted_again,
};
use crashes::{
    a_kind_that_is_served_no_more_holds_nothing_up_and_counts_when_it_is_again,
    another_replica_ends_what_the_leader_began, kill_9_between_two_steps_of_a_deletion_loses_nothing,
    kinds_that_vanish_hold_nothing_up,
};
use e2e::{Suite, replica, replica::Replica, tests};
use futures::{StreamExt as _, TryStreamExt as _};
use keeping::{
    a_network_that_cannot_be_read_can_go, every_repair_of_an_attachment_is_counted_once,
    namespaces_join_and_leave_the_list, what_others_write_into_the_status_goes_and_all_is_quiet_again,
};
use kube::api::DeleteParams;
use lab::{Lab, Topology, wait};
use races::{
    no_pod_is_stranded_by_a_namespace_that_leaves_the_list, no_pod_is_stranded_whatever_comes_first,
    pods_that_nobody_refuses_hold_what_they_name,
};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(5);
/// How soon a network goes after its last user.
const GONE: Duration = Duration::from_secs(3);

fn main() -> ExitCode {
    Suite {
        name: "t-networks",
        topology: Topology::ControlPlaneOnly,
        set_up: |lab| {
            Box::pin(async move {
                replica::prepare(&lab, 2)?;
                replica::serve(&lab, &[1])
            })
        },
        tests: tests![
            kinds_of_others_that_come_later_are_noticed,
            a_network_gets_its_attachments_its_status_and_its_labels_and_goes_in_order,
            what_cannot_be_is_refused_with_a_sentence,
            attachments_are_put_right_and_those_of_others_left_alone,
            every_repair_of_an_attachment_is_counted_once,
            namespaces_join_and_leave_the_list,
            a_network_that_cannot_be_read_can_go,
            what_others_write_into_the_status_goes_and_all_is_quiet_again,
            every_kind_of_user_blocks_deletion_until_it_goes,
            while_a_network_goes_no_kind_begins_to_use_it,
            what_a_user_makes_is_let_in,
            without_a_controller_pods_are_made_and_networks_are_not,
            the_finished_hold_nothing,
            what_a_counted_object_makes_is_not_counted_again,
            people_see_how_many_use_it_and_the_first_ten,
            a_namespace_goes_with_a_used_attachment_and_comes_back,
            clashes_are_refused_where_seen_and_decided_where_not,
            one_uplink_and_one_vni_serve_one_network_on_a_node,
            of_two_networks_made_at_once_one_wins,
            a_node_that_carries_less_joins_a_used_overlay,
            a_vanished_node_holds_nothing_up_and_a_silent_one_is_named,
            at_rest_nothing_is_written,
            the_controller_touches_no_other_label,
            kill_9_at_every_step_loses_nothing,
            kill_9_between_two_steps_of_a_deletion_loses_nothing,
            another_replica_ends_what_the_leader_began,
            a_kind_that_is_served_no_more_holds_nothing_up_and_counts_when_it_is_again,
            kinds_that_vanish_hold_nothing_up,
            pods_that_nobody_refuses_hold_what_they_name,
            no_pod_is_stranded_whatever_comes_first,
            no_pod_is_stranded_by_a_namespace_that_leaves_the_list,
            a_controller_among_thousands_of_users_stays_small_and_quick,
        ],
    }
    .run()
}

/// A controller that leads and whose webhook answers, and this test's share of the cluster.
async fn start(lab: &Lab, name: &str) -> Result<(Cluster, Replica)> {
    let cluster = Cluster::new(lab, name).await?;
    cluster.install_attachments().await?;
    cluster.install_machines().await?;
    let replica = cluster.lead(lab).await?;
    cluster.webhook_answers().await.with_context(|| replica.tail())?;
    Ok((cluster, replica))
}

fn spec(cluster: &Cluster) -> Value {
    json!({"nodeSelector": cluster.selector(), "attachment": {"namespaces": [cluster.namespace]}})
}

async fn kinds_of_others_that_come_later_are_noticed(lab: Lab) -> Result<()> {
    let cluster = Cluster::new(&lab, "late").await?;
    let replica = cluster.lead(&lab).await?;
    let outcome = async {
        cluster.webhook_answers().await?;
        cluster.node("late-a", 1500).await?;
        cluster.create("late", spec(&cluster)).await?;
        cluster.report("late-a", "late", true).await?;
        let network = cluster.reason("late", "Ready", "AttachmentsMissing").await?;
        println!("{}", condition(&network, "Ready").context("Ready")?["message"]);
        // Without the kinds a network can go as well.
        cluster.create("short", json!({"nodeSelector": cluster.selector()})).await?;
        cluster.finalizer("short", "patchbay.dev/users", true).await?;
        cluster.delete("short").await?;
        cluster.gone("short", GONE).await?;
        cluster.install_attachments().await?;
        cluster.nad("late", "late").await?;
        cluster.condition("late", "Ready", "True").await?;
        cluster.install_machines().await?;
        let vm = cluster.user(users::virtual_machine("vm", "late")).await?;
        cluster.condition("late", "InUse", "True").await?;
        cluster.remove(&vm).await?;
        cluster.condition("late", "InUse", "False").await?;
        cluster.unlist("late-a").await?;
        cluster.delete("late").await?;
        cluster.gone("late", GONE).await
    };
    outcome.await.with_context(|| replica.tail())
}

async fn a_network_gets_its_attachments_its_status_and_its_labels_and_goes_in_order(lab: Lab) -> Result<()> {
    let (cluster, replica) = start(&lab, "basic").await?;
    cluster.node("basic-a", 1500).await?;
    let outcome = async {
        let begun = Instant::now();
        let mut spec = spec(&cluster);
        spec["overlay"] = json!({"vni": 17});
        cluster.create("basic", spec).await?;
        let nad = cluster.nad("basic", "basic").await?;
        ensure!(nad["spec"]["config"].as_str().is_some_and(|it| it.contains("\"mtu\":1450")), "{nad}");
        println!("attachment after {:?}", begun.elapsed());
        cluster.report("basic-a", "basic", true).await?;
        let network = cluster.condition("basic", "Ready", "True").await?;
        ensure!(
            network["status"]["mtu"] == 1450 && network["status"]["nodes"]["summary"] == "1/1",
            "{network}"
        );
        cluster.label("basic-a", "basic", true).await?;
        let pod = cluster.pod("user", "basic").await?;
        cluster.condition("basic", "InUse", "True").await?;
        // Foreground deletion takes nothing away either.
        let foreground = DeleteParams::foreground();
        cluster.api(&cluster::networks(), None).delete("basic", &foreground).await?;
        let network = cluster.reason("basic", "Ready", "DeletionBlocked").await?;
        println!("{}", condition(&network, "Ready").context("Ready")?["message"]);
        ensure!(cluster.refused("late", "basic").await?, "a new user was let in");
        ensure!(cluster.find_nad("basic", "basic").await?.is_some(), "the attachment was taken away");
        cluster.remove(&pod).await?;
        let begun = Instant::now();
        cluster.finalizer("basic", "patchbay.dev/users", false).await?;
        ensure!(cluster.find_nad("basic", "basic").await?.is_none(), "the attachment is still there");
        cluster.unlist("basic-a").await?;
        cluster.gone("basic", GONE).await?;
        println!("gone {:?} after its last user", begun.elapsed());
        cluster.label("basic-a", "basic", false).await
    };
    outcome.await.with_context(|| replica.tail())
}

async fn what_cannot_be_is_refused_with_a_sentence(lab: Lab) -> Result<()> {
    let (cluster, replica) = start(&lab, "valid").await?;
    let long = "x".repeat(51);
    let rows = [
        ("UPPER", json!({}), "RFC 1123"),
        (long.as_str(), json!({}), "at most 50 characters"),
        ("a.dot", json!({}), "at most 50 characters"),
        ("bad", json!({"bridge": "br/0"}), "spec.bridge"),
        ("bad", json!({"bridge": "sixteen-bytes-xx"}), "spec.bridge"),
        ("bad", json!({"bridge": "; reboot"}), "spec.bridge"),
        ("bad", json!({"bridge": ".."}), "spec.bridge"),
        ("bad", json!({"bridge": "lo"}), "reserved by the kernel"),
        ("bad", json!({"bridge": ""}), "spec.bridge"),
        ("bad", json!({"mtu": 575}), "spec.mtu"),
        ("bad", json!({"mtu": 9217}), "spec.mtu"),
        ("bad", json!({"mtu": "1500"}), "spec.mtu"),
        ("bad", json!({"overlay": {}}), "spec.overlay.vni"),
        ("bad", json!({"overlay": {"vni": 0}}), "spec.overlay.vni"),
        ("bad", json!({"overlay": {"vni": 16_777_216}}), "spec.overlay.vni"),
        ("bad", json!({"overlay": {"vni": 1, "port": 65536}}), "spec.overlay.port"),
        ("bad", json!({"uplink": "lo"}), "loopback"),
        ("bad", json!({"uplink": "eth1", "overlay": {"vni": 1}}), "mutually exclusive"),
        ("bad", json!({"uplink": "eth1", "bridge": "eth1"}), "different names"),
        ("bad", json!({"attachment": {"name": "A"}}), "spec.attachment.name"),
        ("bad", json!({"attachment": {"namespaces": ["a", "a"]}}), "Duplicate"),
        ("bad", json!({"attachment": {"namespaces": ["a/b"]}}), "spec.attachment.namespaces"),
        (
            "bad",
            json!({"nodeSelector": {"matchExpressions": [{"key": "a", "operator": "In"}]}}),
            "need values",
        ),
    ];
    for (name, spec, sentence) in rows {
        let told = cluster.refusal(name, spec.clone()).await?;
        ensure!(told.contains(sentence), "{name} {spec}: {told}");
    }
    let outcome = async {
        let whole = json!({"bridge": "br-valid", "overlay": {"vni": 1}, "attachment": {"name": "nad"}, "nodeSelector": cluster.selector()});
        cluster.create("valid", whole).await?;
        cluster.create("plain", json!({"nodeSelector": cluster.selector()})).await?;
        for (name, patch, sentence) in [
            ("valid", json!({"bridge": "other"}), "spec.bridge cannot be changed"),
            ("valid", json!({"bridge": null}), "spec.bridge cannot be changed"),
            ("plain", json!({"bridge": "br-set"}), "spec.bridge cannot be changed"),
            ("valid", json!({"overlay": {"vni": 2}}), "spec.overlay.vni cannot be changed"),
            ("valid", json!({"overlay": null}), "spec.overlay cannot be set or unset"),
            ("plain", json!({"overlay": {"vni": 2}}), "spec.overlay cannot be set or unset"),
            ("valid", json!({"attachment": {"name": "other"}}), "spec.attachment.name cannot be changed"),
            ("valid", json!({"attachment": null}), "spec.attachment.name cannot be changed"),
            ("plain", json!({"attachment": {"name": "set"}}), "spec.attachment.name cannot be changed"),
        ] {
            let told = cluster
                .edit(name, patch.clone())
                .await
                .err()
                .with_context(|| format!("{name} {patch} passed"))?;
            ensure!(format!("{told:#}").contains(sentence), "{patch}: {told:#}");
        }
        for name in ["valid", "plain"] {
            cluster.delete(name).await?;
            cluster.gone(name, GONE).await?;
        }
        Ok(())
    };
    let outcome: Result<()> = outcome.await;
    outcome.with_context(|| replica.tail())
}

async fn attachments_are_put_right_and_those_of_others_left_alone(lab: Lab) -> Result<()> {
    let (cluster, replica) = start(&lab, "repair").await?;
    let outcome = async {
        let foreign = json!({"apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
            "metadata": {"name": "theirs"}, "spec": {"config": "{\"type\": \"bridge\"}"}});
        cluster.post(&cluster::nads(), Some("repair"), &foreign).await?;
        cluster.create("repair", spec(&cluster)).await?;
        cluster.create("theirs", spec(&cluster)).await?;
        let nad = cluster.nad("repair", "repair").await?;
        cluster.until("repair", "a status", |network| network["status"]["mtu"] == 1500).await?;
        let network = cluster.condition("theirs", "Conflict", "True").await?;
        let message = &condition(&network, "Conflict").context("Conflict")?["message"];
        ensure!(message.as_str().is_some_and(|it| it.contains("repair/theirs")), "{message}");
        let api = cluster.api(&cluster::nads(), Some("repair"));
        let begun = Instant::now();
        api.delete("repair", &DeleteParams::default()).await?;
        cluster.nad("repair", "repair").await?;
        println!("made anew after {:?}", begun.elapsed());
        ensure!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
        for patch in [
            json!({"spec": {"config": "{}"}}),
            json!({"metadata": {"labels": {"patchbay.dev/network": null}}}),
        ] {
            let begun = Instant::now();
            cluster.merge(&cluster::nads(), Some("repair"), "repair", &patch).await?;
            wait::until(Duration::from_secs(1), &format!("{patch} to be put right"), || async {
                let now = cluster.nad("repair", "repair").await?;
                let same =
                    now["spec"] == nad["spec"] && now["metadata"]["labels"] == nad["metadata"]["labels"];
                Ok(same.then_some(()))
            })
            .await?;
            println!("put right after {:?}", begun.elapsed());
        }
        for name in ["repair", "theirs"] {
            cluster.delete(name).await?;
            cluster.gone(name, GONE).await?;
        }
        let left =
            cluster.find_nad("repair", "theirs").await?.context("the foreign attachment was deleted")?;
        ensure!(left["spec"] == foreign["spec"] && left["metadata"].get("labels").is_none(), "{left}");
        ensure!(cluster.find_nad("repair", "repair").await?.is_none(), "our own was left");
        cluster.events_tell("AttachmentRepaired").await
    };
    outcome.await.with_context(|| replica.tail())
}

async fn every_kind_of_user_blocks_deletion_until_it_goes(lab: Lab) -> Result<()> {
    let (cluster, replica) = start(&lab, "users").await?;
    let all = users::all();
    let blocked = async |number: usize, user: (cluster::User, Value)| {
        let name = format!("used-{number}");
        cluster.create(&name, spec(&cluster)).await?;
        cluster.nad("users", &name).await?;
        let user = cluster.user(users::naming(user, &name, "users", &name)).await?;
        let what = format!("{} users/{}", user.resource.kind, user.name);
        cluster.until(&name, &what, |network| network["status"]["users"]["first"] == json!([what])).await?;
        cluster.delete(&name).await?;
        cluster.reason(&name, "Ready", "DeletionBlocked").await?;
        cluster.remove(&user).await?;
        let begun = Instant::now();
        cluster.gone(&name, GONE).await.with_context(|| what.clone())?;
        println!("{what}: gone after {:?}", begun.elapsed());
        anyhow::Ok(())
    };
    let rounds = all.into_iter().enumerate().map(|(number, user)| blocked(number, user));
    let ended = futures::future::join_all(rounds).await;
    ended.into_iter().collect::<Result<Vec<()>>>().map(drop).with_context(|| replica.tail())
}

async fn a_namespace_goes_with_a_used_attachment_and_comes_back(lab: Lab) -> Result<()> {
    let (cluster, replica) = start(&lab, "comes").await?;
    let outcome = async {
        cluster.node("comes-a", 1500).await?;
        cluster.make_namespace("goes").await?;
        let away = Cluster { namespace: "goes".to_owned(), ..cluster.clone() };
        let spec = json!({"nodeSelector": cluster.selector(), "attachment": {"namespaces": ["goes"]}});
        cluster.create("comes", spec).await?;
        cluster.report("comes-a", "comes", true).await?;
        away.nad("goes", "comes").await?;
        away.pod("user", "comes").await?;
        cluster.condition("comes", "InUse", "True").await?;
        let namespaces = cluster::resource("", "v1", "Namespace", "namespaces");
        let api = cluster.api(&namespaces, None);
        api.delete("goes", &DeleteParams::default()).await?;
        wait::until(SOON * 3, "the namespace to go", || async {
            Ok(api.get_opt("goes").await?.is_none().then_some(()))
        })
        .await?;
        cluster.reason("comes", "Ready", "AttachmentsMissing").await?;
        cluster.make_namespace("goes").await?;
        cluster.nad("goes", "comes").await?;
        cluster.condition("comes", "Ready", "True").await?;
        cluster.unlist("comes-a").await?;
        cluster.delete("comes").await?;
        cluster.gone("comes", GONE).await
    };
    outcome.await.with_context(|| replica.tail())
}

async fn clashes_are_refused_where_seen_and_decided_where_not(lab: Lab) -> Result<()> {
    let (cluster, replica) = start(&lab, "clash").await?;
    let outcome = async {
        cluster.node("clash-a", 1500).await?;
        let selector = |value: &str| json!({"matchLabels": {"test": "clash", "half": value}});
        cluster.relabel("clash-a", json!({"half": "one"})).await?;
        let whole = json!({"bridge": "br-clash", "overlay": {"vni": 99}, "nodeSelector": selector("one"), "attachment": {"name": "clash", "namespaces": ["clash"]}});
        cluster.create("clash", whole.clone()).await?;
        cluster.nad("clash", "clash").await?;
        for (field, value, sentence) in [
            ("bridge", json!("br-clash"), "bridge br-clash belongs to BridgeNetwork clash"),
            ("overlay", json!({"vni": 99}), "VNI 99 on port 4789 belongs to BridgeNetwork clash"),
            ("uplink", json!("br-clash"), "link br-clash belongs to BridgeNetwork clash"),
        ] {
            let told =
                cluster.refusal("second", json!({field: value, "nodeSelector": cluster.selector()})).await?;
            ensure!(told.contains(sentence), "{told}");
        }
        let same = json!({"nodeSelector": selector("two"), "attachment": {"name": "clash", "namespaces": ["clash"]}});
        let told = cluster.refusal("second", same).await?;
        ensure!(
            told.contains("BridgeNetwork clash keeps NetworkAttachmentDefinition clash/clash already"),
            "{told}"
        );
        // Apart they may be; then the node gets both, which no webhook sees.
        cluster
            .create(
                "second",
                json!({"bridge": "br-clash", "nodeSelector": {"matchLabels": {"second": "yes"}}}),
            )
            .await?;
        cluster.condition("second", "Conflict", "False").await?;
        cluster.relabel("clash-a", json!({"second": "yes"})).await?;
        let network = cluster.condition("second", "Conflict", "True").await?;
        println!("{}", condition(&network, "Conflict").context("Conflict")?["message"]);
        cluster.condition("clash", "Conflict", "False").await?;
        // An edit that makes nothing worse passes.
        cluster.edit("second", json!({"mtu": 1400})).await?;
        // Used, the MTU goes up and never down.
        let pod = cluster.pod("user", "clash").await?;
        cluster.condition("clash", "InUse", "True").await?;
        let told = cluster.edit("clash", json!({"mtu": 1000})).await.err().context("lowered while used")?;
        ensure!(format!("{told:#}").contains("cannot go from 1450 down to 1000"), "{told:#}");
        cluster.vtep("clash-a", 9000).await?;
        cluster.until("clash", "the MTU raised", |network| network["status"]["mtu"] == 8950).await?;
        cluster.vtep("clash-a", 1400).await?;
        cluster.reason("clash", "MtuReduced", "HeldByUsers").await?;
        cluster.remove(&pod).await?;
        cluster.until("clash", "the MTU lowered", |network| network["status"]["mtu"] == 1350).await?;
        for name in ["second", "clash"] {
            cluster.delete(name).await?;
            cluster.gone(name, GONE).await?;
        }
        cluster.events_tell("Conflict").await
    };
    outcome.await.with_context(|| replica.tail())
}

async fn a_vanished_node_holds_nothing_up_and_a_silent_one_is_named(lab: Lab) -> Result<()> {
    let (cluster, replica) = start(&lab, "silent").await?;
    let outcome = async {
        for node in ["silent-a", "silent-b"] {
            cluster.node(node, 1500).await?;
        }
        cluster.create("silent", spec(&cluster)).await?;
        cluster.finalizer("silent", "patchbay.dev/nodes", true).await?;
        for node in ["silent-a", "silent-b"] {
            cluster.report(node, "silent", true).await?;
        }
        cluster.condition("silent", "Ready", "True").await?;
        cluster.silence("silent-b").await?;
        cluster
            .until("silent", "the silent node", |it| it["status"]["notReady"][0]["reason"] == "NodeNotReady")
            .await?;
        cluster.delete("silent").await?;
        cluster.finalizer("silent", "patchbay.dev/users", false).await?;
        cluster.unlist("silent-a").await?;
        let waits = |network: &Value| {
            let message =
                condition(network, "Ready").and_then(|it| it["message"].as_str()).unwrap_or_default();
            message.contains("silent-b (NodeNotReady") && !message.contains("silent-a")
        };
        cluster.until("silent", "to wait for the silent node", waits).await?;
        let nodes = cluster::resource("", "v1", "Node", "nodes");
        cluster.api(&nodes, None).delete("silent-b", &DeleteParams::default()).await?;
        cluster.gone("silent", GONE).await
    };
    outcome.await.with_context(|| replica.tail())
}

async fn at_rest_nothing_is_written(lab: Lab) -> Result<()> {
    let (cluster, replica) = start(&lab, "rest").await?;
    let outcome = async {
        cluster.node("rest-a", 1500).await?;
        let mark = lab.audit_offset()?;
        cluster.create("rest", spec(&cluster)).await?;
        cluster.nad("rest", "rest").await?;
        cluster.report("rest-a", "rest", true).await?;
        cluster.label("rest-a", "rest", true).await?;
        cluster.condition("rest", "Ready", "True").await?;
        // What the last writes set off has come and gone.
        tokio::time::sleep(Duration::from_secs(2)).await;
        let writes = Cluster::writes(&lab, mark)?;
        println!("{} writes for a new network: {writes:?}", writes.len());
        let mark = lab.audit_offset()?;
        tokio::time::sleep(Duration::from_secs(4)).await;
        let writes = Cluster::writes(&lab, mark)?;
        ensure!(writes.is_empty(), "at rest: {writes:?}");
        // Users that come in a crowd are written once a second.
        let mark = lab.audit_offset()?;
        for number in 0..30 {
            cluster.pod(&format!("pod-{number}"), "rest").await?;
        }
        cluster.until("rest", "all users", |network| network["status"]["users"]["count"] == 30).await?;
        let writes = Cluster::writes(&lab, mark)?;
        ensure!(writes.len() <= 4, "30 pods: {writes:?}");
        cluster.sweep_pods().await?;
        cluster.unlist("rest-a").await?;
        cluster.delete("rest").await?;
        cluster.gone("rest", GONE).await
    };
    outcome.await.with_context(|| replica.tail())
}

async fn the_controller_touches_no_other_label(lab: Lab) -> Result<()> {
    let (cluster, replica) = start(&lab, "policy").await?;
    cluster.node("policy-a", 1500).await?;
    let mut config = lab.client_config().await?;
    config.auth_info.impersonate =
        Some("system:serviceaccount:patchbay-system:patchbay-controller".to_owned());
    let controller = Cluster { client: kube::Client::try_from(config)?, ..cluster.clone() };
    for labels in [json!({"other": "x"}), json!({"test": null}), json!({"test": "other"})] {
        let told = controller.relabel("policy-a", labels.clone()).await.err();
        let told = format!("{:#}", told.with_context(|| format!("{labels} was let in"))?);
        ensure!(told.contains("may only change labels"), "{told}");
    }
    let made_up = json!({"network.patchbay.dev/made-up": "true"});
    controller.relabel("policy-a", made_up).await.with_context(|| replica.tail())?;
    // It stands for no network and is taken away.
    cluster.label("policy-a", "made-up", false).await.with_context(|| replica.tail())
}

async fn kill_9_at_every_step_loses_nothing(lab: Lab) -> Result<()> {
    let (cluster, mut replica) = start(&lab, "kill").await?;
    cluster.node("kill-a", 1500).await?;
    let has = |network: &Option<Value>, finalizer: &str| {
        let all = network.as_ref().and_then(|it| it["metadata"]["finalizers"].as_array());
        all.is_some_and(|all| all.iter().any(|it| it == finalizer))
    };
    let steps: [&str; 7] =
        ["finalizers", "attachment", "status", "label", "blocked", "attachment gone", "released"];
    cluster.create("kill", spec(&cluster)).await?;
    for step in steps {
        match step {
            "label" => cluster.report("kill-a", "kill", true).await?,
            "blocked" => {
                cluster.pod("user", "kill").await?;
                cluster.delete("kill").await?;
            }
            "attachment gone" => cluster.sweep_pods().await?,
            _ => {}
        }
        let seen = async || -> Result<bool> {
            let network = cluster.network("kill").await?;
            Ok(match step {
                "finalizers" => has(&network, "patchbay.dev/users"),
                "attachment" => cluster.find_nad("kill", "kill").await?.is_some(),
                "status" => network.is_some_and(|it| it["status"]["mtu"] == 1500),
                "label" => cluster.has_label("kill-a", "kill").await?,
                "blocked" => {
                    let network = network.context("gone while used")?;
                    condition(&network, "Ready").is_some_and(|it| it["reason"] == "DeletionBlocked")
                }
                "attachment gone" => cluster.find_nad("kill", "kill").await?.is_none(),
                _ => !has(&network, "patchbay.dev/users"),
            })
        };
        let begun = Instant::now();
        while !seen().await? {
            ensure!(begun.elapsed() < SOON * 2, "{step} is not seen: {}", replica.tail());
        }
        replica.signal(nix::sys::signal::Signal::SIGKILL)?;
        replica.ends_within(SOON).await?;
        if step == "blocked" {
            ensure!(cluster.find_nad("kill", "kill").await?.is_some(), "taken from under a pod");
        }
        replica = cluster.lead(&lab).await?;
    }
    cluster.unlist("kill-a").await?;
    let outcome = async {
        cluster.gone("kill", SOON).await?;
        ensure!(cluster.find_nad("kill", "kill").await?.is_none(), "the attachment was left");
        cluster.label("kill-a", "kill", false).await
    };
    outcome.await.with_context(|| replica.tail())
}

/// Makes many objects, so many at a time.
async fn crowd<F: Future<Output = Result<()>>>(count: usize, make: impl Fn(usize) -> F) -> Result<()> {
    let all = futures::stream::iter((0..count).map(make)).buffer_unordered(32);
    all.try_for_each(|()| async { Ok(()) }).await
}

async fn a_controller_among_thousands_of_users_stays_small_and_quick(lab: Lab) -> Result<()> {
    let (machines, pods) = if e2e::soak() { (10_000, 50_000) } else { (100, 200) };
    let (cluster, replica) = start(&lab, "crowd").await?;
    let outcome = async {
        cluster.create("crowd", spec(&cluster)).await?;
        cluster.nad("crowd", "crowd").await?;
        let quiet: Vec<String> = (0..10).map(|number| format!("quiet-{number}")).collect();
        for name in &quiet {
            cluster.create(name, spec(&cluster)).await?;
            cluster.nad("crowd", name).await?;
        }
        crowd(machines, async |n| {
            cluster.user(users::virtual_machine(&format!("vm-{n}"), "crowd")).await.map(drop)
        })
        .await?;
        crowd(pods, async |n| cluster.pod(&format!("pod-{n}"), "crowd").await.map(drop)).await?;
        let count = machines + pods;
        cluster.until("crowd", "all users", |network| network["status"]["users"]["count"] == count).await?;
        let grown = replica.memory()?;
        // One that has to list all of them when it starts.
        drop(replica);
        let replica = cluster.lead(&lab).await?;
        cluster.delete("crowd").await?;
        cluster.reason("crowd", "Ready", "DeletionBlocked").await?;
        let listed = replica.memory()?;
        let begun = Instant::now();
        let within = if e2e::soak() { SOON * 6 } else { SOON };
        let go = quiet.iter().map(async |name| {
            cluster.delete(name).await?;
            cluster.gone(name, within).await
        });
        futures::future::try_join_all(go).await?;
        println!(
            "{count} users: {grown} MiB grown, {listed} MiB listed; {} unused networks went in {:?}",
            quiet.len(),
            begun.elapsed()
        );
        ensure!(grown.max(listed) <= 150, "too large: {grown} MiB grown, {listed} MiB after a list");
        let machines = cluster::resource("kubevirt.io", "v1", "VirtualMachine", "virtualmachines");
        cluster.sweep_all(&machines).await?;
        cluster.sweep_all(&cluster::resource("", "v1", "Pod", "pods")).await?;
        cluster.gone("crowd", SOON * 6).await.with_context(|| replica.tail())
    };
    outcome.await
}
