//! Bad input is refused with its event, while everything else goes on.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use e2e::{
    bridge::WAIT_TIMEOUT,
    hotplug::{
        LivePod, NETWORKS, bridge_config, create_bridge_nad, create_nad, create_nad_text, create_record_nad,
        element, host_local_addresses, install_record_plugin_as, nads, network_name, plain_pod,
        pod_with_networks, start_live_pod, start_live_pods,
    },
};
use futures::future::try_join_all;
use kube::api::{Patch, PatchParams};
use lab::{
    Lab,
    test_namespace::{TestNamespace, with_namespace},
    wait,
};
use serde_json::{Value, json};

/// How soon a pod must be plugged or unplugged while the plugins of other pods hang.
const OTHERS_LIMIT: Duration = Duration::from_secs(2);

/// Another pod is plugged and unplugged meanwhile.
async fn plug_other(pod: &LivePod) -> Result<()> {
    pod.set_networks(&json!([element("good", "net1")])).await?;
    let took = pod.wait_interfaces_within(Duration::from_secs(5), &["net1"]).await?;
    println!("another pod was plugged within {took:?}");
    pod.set_networks(&json!([])).await?;
    pod.wait_interfaces(&[]).await
}

pub async fn broken_plugins_and_nads_are_reported_and_stop_nothing(lab: Lab) -> Result<()> {
    with_namespace(&lab, "broken", async |ns: &TestNamespace| {
        create_bridge_nad(ns, "good", "10.170.0.0/24").await?;
        let config = |change: fn(&mut Value)| {
            let mut config = bridge_config(ns, "bad", "10.170.1.0/24");
            change(&mut config);
            config
        };
        create_nad(ns, "missing-plugin", &config(|c| c["type"] = json!("no-such-plugin"))).await?;
        create_nad(ns, "path-type", &config(|c| c["type"] = json!("../../../usr/bin/id"))).await?;
        create_nad(ns, "path-name", &config(|c| c["name"] = json!("../../x"))).await?;
        create_nad_text(ns, "no-json", "{\"type\": \"bridge\"").await?;
        create_nad_text(ns, "no-type", "{\"cniVersion\": \"1.0.0\"}").await?;
        create_record_nad(ns, "garbage", "10.170.2.0/24", &json!({"add": {"print": "have fun"}})).await?;
        create_record_nad(ns, "huge", "10.170.3.0/24", &json!({"add": {"printBytes": 10_000_000}})).await?;
        let no_sandbox = json!({"cniVersion": "1.0.0", "type": "lab-record", "name": network_name(ns, "nosandbox"),
            "add": {"result": {"cniVersion": "1.0.0", "interfaces": [{"name": "host0"}], "dns": {}}}});
        create_nad(ns, "no-sandbox", &no_sandbox).await?;
        create_bridge_nad(ns, "device", "10.170.4.0/24").await?;
        let annotations = json!({"metadata": {"annotations": {"k8s.v1.cni.cncf.io/resourceName": "vendor.example/vf"}}});
        nads(ns).patch("device", &PatchParams::default(), &Patch::Merge(&annotations)).await?;
        let [pod, other] =
            start_live_pods(ns, [plain_pod("bad", "node-1"), plain_pod("other", "node-1")]).await?;
        let bad = [
            ("missing-plugin", "FailedAddingInterface", "no-such-plugin"),
            ("path-type", "FailedAddingInterface", "type"),
            ("path-name", "FailedAddingInterface", "../../x"),
            ("no-json", "FailedAddingInterface", "no-json"),
            ("no-type", "FailedAddingInterface", "type"),
            ("garbage", "FailedAddingInterface", "have fun"),
            ("huge", "FailedAddingInterface", "lab-record"),
            ("no-sandbox", "FailedAddingInterface", ""),
            ("device", "DeviceRequired", "vendor.example/vf"),
            ("absent", "FailedAddingInterface", "absent"),
        ];
        let mut networks: Vec<Value> =
            bad.iter().enumerate().map(|(n, (name, ..))| element(name, &format!("bad{n}"))).collect();
        networks.insert(3, element("good", "net1"));
        networks.push(element("good", "net2"));
        pod.set_networks(&json!(networks)).await?;
        plug_other(&other).await?;
        pod.wait_interfaces(&["net1", "net2"]).await?;
        for (number, (name, reason, text)) in bad.into_iter().enumerate() {
            let interface = format!("bad{number}");
            let event = wait::until(WAIT_TIMEOUT, &format!("event {reason} about {name}"), || async {
                let all = pod.events().await?;
                let mentions = |message: &str| message.contains(name) || message.contains(&interface);
                let found = all.iter().find(|e| e.reason == reason && mentions(&e.message) && e.message.contains(text));
                found.cloned().map(Some).with_context(|| format!("{all:#?}"))
            })
            .await?;
            println!("{name}: {}", event.message);
            ensure!(event.kind == "Warning" && event.message.len() < 1100, "{event:?}");
            let attachments = pod.attachments().await?;
            let state = attachments.iter().find(|one| one["interface"] == interface.as_str());
            let state = state.with_context(|| format!("no state of {name}: {attachments:?}"))?;
            ensure!(["Failed", "Refused"].contains(&state["state"].as_str().unwrap_or_default()), "{state}");
            ensure!(state["message"].as_str().is_some_and(|text| !text.is_empty()), "{state}");
        }
        plug_other(&other).await?;
        pod.set_networks(&json!([])).await?;
        pod.wait_interfaces(&[]).await?;
        for network in ["bad", "garbage", "huge"] {
            let held = host_local_addresses(&lab, "node-1", &network_name(ns, network));
            ensure!(held.is_empty(), "{network} leaks {held:?}");
        }
        let warnings = pod.events().await?.into_iter().filter(|e| e.kind == "Warning").collect::<Vec<_>>();
        ensure!(warnings.len() == bad.len(), "one Warning per error: {warnings:#?}");
        Ok(())
    })
    .await
}

/// Pods of one namespace whose elements hang and fail, and a pod of another namespace with the same plugin.
pub async fn failing_pods_of_a_namespace_leave_places_for_others(lab: Lab) -> Result<()> {
    with_namespace(&lab, "crowd", async |ns: &TestNamespace| {
        with_namespace(&lab, "beside", async |beside: &TestNamespace| {
            // A type of its own, so that other tests have the limit of `lab-record` for themselves.
            install_record_plugin_as(&lab, "node-1", "lab-crowd")?;
            let fail = json!({"code": 11, "msg": "crowded"});
            let options = json!({"type": "lab-crowd", "add": {"hang": 5, "fail": fail}});
            create_record_nad(ns, "bad", "10.174.0.0/24", &options).await?;
            create_record_nad(beside, "good", "10.174.1.0/24", &json!({"type": "lab-crowd"})).await?;
            let crowd = (0..8).map(|number| plain_pod(&format!("crowd-{number}"), "node-1"));
            let crowd = try_join_all(crowd.map(|pod| start_live_pod(ns, pod))).await?;
            let other = start_live_pod(beside, plain_pod("other", "node-1")).await?;
            let elements: Vec<Value> = (0..8).map(|number| element("bad", &format!("bad{number}"))).collect();
            for pod in &crowd {
                pod.set_networks(&json!(elements)).await?;
            }
            let running = || -> Result<usize> {
                let calls = lab.plugin_calls("node-1")?;
                let adds = calls.iter().filter(|call| call.program == "lab-crowd" && call.command == "ADD");
                let ours = adds.filter(|call| call.environment["CNI_ARGS"].contains(&ns.namespace));
                Ok(ours.filter(|call| call.ended.is_none()).count())
            };
            wait::until(WAIT_TIMEOUT, "6 calls to run", || async {
                let running = running()?;
                ensure!(running == 6, "{running} calls run");
                Ok(Some(()))
            })
            .await?;
            for _ in 0..4 {
                other.set_networks(&json!([element("good", "net1")])).await?;
                let plugged = other.wait_interfaces_within(OTHERS_LIMIT, &["net1"]).await?;
                other.set_networks(&json!([])).await?;
                other.wait_interfaces_within(OTHERS_LIMIT, &[]).await?;
                println!("8 pods of another namespace fail: a pod is plugged in {plugged:?}");
                ensure!(running()? <= 6, "more than three quarters of the places");
            }
            Ok(())
        })
        .await
    })
    .await
}

/// How many pods start at once: more take longer than the limit for one pod.
const START_BATCH: usize = 10;

pub async fn a_plugin_that_hangs_in_many_pods_delays_no_other_pod(lab: Lab) -> Result<()> {
    let count = if e2e::soak() { 50 } else { 12 };
    with_namespace(&lab, "hang", async |ns: &TestNamespace| {
        create_bridge_nad(ns, "good", "10.171.0.0/24").await?;
        // A type of its own, so that other tests have the limit of `lab-record` for themselves.
        install_record_plugin_as(&lab, "node-2", "lab-hang")?;
        let options = json!({"type": "lab-hang", "add": {"hang": 600}});
        create_record_nad(ns, "hang", "10.171.1.0/24", &options).await?;
        let other = start_live_pod(ns, plain_pod("other", "node-2")).await?;
        let mut hanging: Vec<LivePod> = Vec::new();
        while hanging.len() < count {
            let numbers = hanging.len()..count.min(hanging.len() + START_BATCH);
            let pods = numbers.map(|number| plain_pod(&format!("hang-{number}"), "node-2"));
            hanging.extend(try_join_all(pods.map(|pod| start_live_pod(ns, pod))).await?);
        }
        for pod in &hanging {
            pod.set_networks(&json!([element("hang", "net1")])).await?;
        }
        // The first of them are plugged before the calls that hang count as slow.
        for _ in 0..8 {
            other.set_networks(&json!([element("good", "net1")])).await?;
            let plugged = other.wait_interfaces_within(OTHERS_LIMIT, &["net1"]).await?;
            other.set_networks(&json!([])).await?;
            let unplugged = other.wait_interfaces_within(OTHERS_LIMIT, &[]).await?;
            println!("{count} pods hang: another one is plugged in {plugged:?}, unplugged in {unplugged:?}");
        }
        // On a loaded machine the first calls are killed before the last pod is listed.
        for pod in &hanging {
            wait::until(WAIT_TIMEOUT, &format!("{} to be Pending or Failed", pod.name), || async {
                let all = pod.attachments().await?;
                let unfinished = |one: &Value| one["state"] == "Pending" || one["state"] == "Failed";
                ensure!(all.len() == 1 && all.iter().all(unfinished), "{all:?}");
                Ok(Some(()))
            })
            .await?;
        }
        let running = || -> Result<usize> {
            let calls = lab.plugin_calls("node-2")?;
            let added = calls.iter().filter(|call| call.program == "lab-hang" && call.command == "ADD");
            let ours = added.filter(|call| call.environment["CNI_ARGS"].contains(&ns.namespace));
            let pids = ours.filter(|call| call.ended.is_none()).map(|call| call.pid.to_string());
            let processes = lab.node("node-2").output(&["ls", "/proc"])?;
            Ok(pids.filter(|pid| processes.lines().any(|process| process == pid)).count())
        };
        // A killed call that is not reaped yet counts for a moment. One namespace has three quarters of the places.
        wait::until(WAIT_TIMEOUT, "6 calls to hang", || async {
            let running = running()?;
            ensure!(running == 6, "{running} calls hang");
            Ok(Some(()))
        })
        .await?;
        // After 30 s the plugin is killed, and the pod's next edit is applied.
        let called = |pod: &&LivePod| pod.plugin_calls().is_ok_and(|calls| !calls.is_empty());
        let called = hanging.iter().find(called).context("no pod has a call that hangs")?;
        let event = called.wait_event("FailedAddingInterface", "lab-hang").await?;
        println!("{}", event.message);
        let calls = called.plugin_calls()?;
        let killed = calls.iter().find(|call| call.command == "ADD").context("the call")?;
        ensure!(killed.ended.is_none(), "{killed:?}");
        let alive = lab.node("node-2").output(&[
            "sh",
            "-c",
            &format!("kill -0 {} 2>/dev/null && echo yes; true", killed.pid),
        ])?;
        ensure!(alive.trim().is_empty(), "the plugin was not killed");
        called.set_networks(&json!([element("good", "net1")])).await?;
        called.wait_interfaces(&["net1"]).await
    })
    .await
}

pub async fn an_annotation_that_cannot_be_parsed_changes_nothing(lab: Lab) -> Result<()> {
    with_namespace(&lab, "unparsable", async |ns: &TestNamespace| {
        create_bridge_nad(ns, "good", "10.172.0.0/24").await?;
        let cold = pod_with_networks("p", "node-1", &json!([element("good", "net1")]));
        let [pod, other] = start_live_pods(ns, [cold, plain_pod("other", "node-1")]).await?;
        pod.set_networks(&json!([element("good", "net1"), element("good", "net2")])).await?;
        pod.wait_interfaces(&["net1", "net2"]).await?;
        let indexes = [pod.link_index("net1")?, pod.link_index("net2")?];
        for text in [
            r#"[{"name": "good", "interface": "net1"},"#,
            r#"{"name": "good"}"#,
            "good@net1@net2",
            "a/b/c",
            r#"[{"name": 7}]"#,
        ] {
            pod.annotate(json!({NETWORKS: text})).await?;
            let known = pod.events().await?.len();
            let event = pod.wait_event("InvalidNetworks", "").await?;
            ensure!(event.kind == "Warning", "{event:?}");
            plug_other(&other).await?;
            println!("{text}: {} ({known} events)", pod.events().await?.last().map_or("", |e| &e.message));
            ensure!(indexes == [pod.link_index("net1")?, pod.link_index("net2")?], "{text} changed a link");
        }
        // A bad element does not stop the other ones; the event says which one it is.
        let networks = json!([
            element("good", "net1"), {"name": "good", "interface": "net3", "ips": ["10.0.0.300/24"]},
            element("good", "net2"), {"name": "good", "interface": "net4", "mac": "no-mac"},
        ]);
        pod.set_networks(&networks).await?;
        let event = pod.wait_event("InvalidNetworks", "10.0.0.300").await?;
        println!("{}", event.message);
        ensure!(event.message.contains('2') || event.message.contains("[1]"), "no position: {event:?}");
        ensure!(
            indexes == [pod.link_index("net1")?, pod.link_index("net2")?],
            "a bad element changed a link"
        );
        pod.set_networks(&json!([])).await?;
        pod.wait_interfaces(&[]).await
    })
    .await
}

pub async fn names_and_changed_requests_are_refused(lab: Lab) -> Result<()> {
    with_namespace(&lab, "refused", async |ns: &TestNamespace| {
        let mut config = bridge_config(ns, "good", "10.173.0.0/24");
        config["capabilities"] = json!({"mac": true, "ips": true});
        create_nad(ns, "good", &config).await?;
        let pod = start_live_pod(ns, plain_pod("p", "node-1")).await?;
        let mut first = json!({"name": "good", "interface": "net1", "mac": "02:00:00:00:01:73", "ips": ["10.173.0.9/24"]});
        pod.set_networks(&json!([first])).await?;
        pod.wait_interfaces(&["net1"]).await?;
        ensure!(pod.address("net1")? == "10.173.0.9", "{:?}", pod.addresses("net1")?);
        let index = pod.link_index("net1")?;
        for (key, value) in [("mac", json!("02:00:00:00:02:73")), ("ips", json!(["10.173.0.10/24"]))] {
            let mut changed = first.clone();
            changed[key] = value;
            pod.set_networks(&json!([changed])).await?;
            let event = pod.wait_event("AttachmentUpdateRejected", key).await?;
            println!("{}", event.message);
            ensure!(event.kind == "Warning", "{event:?}");
        }
        ensure!(pod.link_index("net1")? == index, "net1 was made again");
        // The same request in another spelling is no change.
        first["mac"] = json!("02-00-00-00-01-73");
        let networks = json!([
            first, element("good", "eth0"), element("good", "sixteen-bytes-xx"), element("good", "a/b"),
            element("good", "net1"), element("good", "net2"),
        ]);
        pod.set_networks(&networks).await?;
        pod.wait_interfaces(&["net1", "net2"]).await?;
        pod.wait_event("InterfaceNameTaken", "eth0").await?;
        pod.wait_event("InterfaceNameTaken", "net1").await?;
        pod.wait_event("InvalidNetworks", "sixteen-bytes-xx").await?;
        pod.wait_event("InvalidNetworks", "a/b").await?;
        // A link that another program created is left alone.
        pod.run(&["ip", "link", "add", "own0", "type", "veth", "peer", "name", "own1"])?;
        let own = pod.link_index("own0")?;
        pod.set_networks(&json!([first, element("good", "own0")])).await?;
        pod.wait_event("InterfaceNameTaken", "own0").await?;
        ensure!(pod.link_index("own0")? == own && pod.link_index("net1")? == index, "{:?}", pod.link_names()?);
        pod.set_networks(&json!([])).await?;
        wait::until(WAIT_TIMEOUT, "net1 to be removed", || async {
            Ok((!pod.link_names()?.contains("net1")).then_some(()))
        })
        .await?;
        ensure!(pod.link_index("own0")? == own, "{:?}", pod.link_names()?);
        Ok(())
    })
    .await
}
