//! `kubectl patchbay plug` and `unplug`.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use e2e::{
    command_line::run,
    hotplug::{
        NETWORKS, bridge_config, create_bridge_nad, create_nad, create_record_nad, element, plain_pod,
        start_live_pods,
    },
};
use kube::ResourceExt as _;
use lab::{
    Lab,
    test_namespace::{TestNamespace, with_namespace},
};
use serde_json::{Value, json};

pub async fn the_command_line_plugs_and_unplugs(lab: Lab) -> Result<()> {
    with_namespace(&lab, "cli", async |ns: &TestNamespace| {
        let mut config = bridge_config(ns, "blue", "10.190.0.0/24");
        config["capabilities"] = json!({"mac": true, "ips": true});
        create_nad(ns, "blue", &config).await?;
        create_bridge_nad(ns, "red", "10.190.1.0/24").await?;
        create_record_nad(ns, "slow", "10.190.2.0/24", &json!({"add": {"hang": 60}})).await?;
        let [pod, slow] =
            start_live_pods(ns, [plain_pod("p", "node-1"), plain_pod("slow", "node-1")]).await?;
        // Unknown keys stay.
        let first = json!({"name": "red", "interface": "net1", "example.com/note": {"keep": true}});
        pod.set_networks(&json!([first])).await?;
        pod.wait_interfaces(&["net1"]).await?;
        let request = ["--ip", "10.190.0.77/24", "--mac", "02:00:00:00:01:90", "--timeout", "30s"];
        let plug = [&["plug", "p", "--network", "blue", "--interface", "net2"][..], &request].concat();
        let (code, text) = run(ns, &plug)?;
        ensure!(code == 0, "{code}: {text}");
        pod.wait_interfaces_within(Duration::from_secs(1), &["net1", "net2"]).await?;
        ensure!(pod.address("net2")? == "10.190.0.77", "{:?}", pod.addresses("net2")?);
        let object = pod.object().await?;
        let networks: Value = serde_json::from_str(object.annotations().get(NETWORKS).context("networks")?)?;
        ensure!(networks[0] == first, "{networks}");

        // Refusals and timeouts.
        let (code, text) = run(ns, &["plug", "p", "--network", "absent", "--timeout", "5s"])?;
        ensure!(code == 1 && text.contains("absent"), "{code}: {text}");
        let (code, text) =
            run(ns, &["plug", "p", "--network", "red", "--interface", "eth0", "--timeout", "10s"])?;
        ensure!(code == 1 && text.contains("eth0"), "{code}: {text}");
        let (code, text) = run(ns, &["plug", "slow", "--network", "slow", "--timeout", "4s"])?;
        ensure!(code == 1, "{code}: {text}");
        let (code, text) = run(ns, &["unplug", "p", "--interface", "net9", "--timeout", "5s"])?;
        ensure!(code == 1 && text.contains("net9"), "{code}: {text}");
        let (code, text) = run(ns, &["plug", "nowhere", "--network", "red", "--timeout", "5s"])?;
        ensure!(code == 1 && text.contains("nowhere"), "{code}: {text}");

        pod.set_networks(&json!([first, element("blue", "net2")])).await?;
        let (code, text) = run(ns, &["unplug", "p", "--interface", "net2", "--timeout", "30s"])?;
        ensure!(code == 0, "{code}: {text}");
        pod.wait_interfaces_within(Duration::from_secs(1), &["net1"]).await?;
        let (code, text) = run(ns, &["unplug", "p", "--network", "red", "--timeout", "30s"])?;
        ensure!(code == 0, "{code}: {text}");
        pod.wait_interfaces_within(Duration::from_secs(1), &[]).await?;
        slow.set_networks(&json!([])).await
    })
    .await
}
