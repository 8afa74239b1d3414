//! Requests that cannot be fulfilled: each is reported on the claim, and others are not affected.

use anyhow::{Context as _, Result, ensure};
use kube::api::DeleteParams;
use lab::Lab;
use serde_json::json;

use super::{
    cluster::{addresses, virtual_machine, vms},
    start_controller,
};

pub async fn requested_addresses_are_checked(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "requests").await?;
    let outcome = async {
        cluster.create_network("requests", &["10.67.0.0/24"]).await?;
        let request = |name: &str, addresses: &str| {
            let mut vm = virtual_machine(name, &[("blue", "requests")]);
            vm["spec"]["template"]["metadata"]["annotations"] =
                json!({"network.kubevirt.io/addresses": addresses});
            vm
        };
        cluster.create_vm(&request("good", r#"{"blue": ["10.67.0.77"]}"#)).await?;
        let claim = cluster.wait_for_addresses("good.blue", 1).await?;
        ensure!(addresses(&claim) == ["10.67.0.77/24"], "{claim:#}");
        for (name, annotation, reason, text) in [
            ("malformed", r#"{"blue": ["10.67.0.300"]}"#, "InternalError", "10.67.0.300"),
            ("unparsable", r#"{"blue": "#, "InternalError", r#"write {"blue": ["10.0.0.4"]}"#),
            ("family", r#"{"blue": ["fd00::7"]}"#, "InternalError", "has no IPv6 subnet"),
            ("outside", r#"{"blue": ["10.99.0.7"]}"#, "InternalError", "10.99.0.7"),
            (
                "taken",
                r#"{"blue": ["10.67.0.77"]}"#,
                "IPAddressConflict",
                "belongs to IPAMClaim requests/good.blue",
            ),
        ] {
            cluster.create_vm(&request(name, annotation)).await?;
            let message = cluster.wait_for_failure(&format!("{name}.blue"), reason).await?;
            ensure!(message.contains(text), "{name}: {message}");
            println!("{name}: {message}");
            for kind in ["VirtualMachine", "VirtualMachineInstance"] {
                let note = cluster.wait_for_event(kind, name, reason).await?;
                ensure!(note == message, "{note}");
            }
        }
        // Freed, the address goes to the machine that waits for it.
        cluster.delete(&vms(), "good", &DeleteParams::background()).await?;
        let claim = cluster.wait_for_addresses("taken.blue", 1).await?;
        ensure!(addresses(&claim) == ["10.67.0.77/24"], "{claim:#}");
        Ok(())
    };
    outcome.await.with_context(|| replica.tail())
}

pub async fn a_network_without_a_free_address_says_so_and_goes_on_when_one_is_freed(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "full").await?;
    let outcome = async {
        cluster.create_network("full", &["10.68.0.0/29"]).await?;
        // Six addresses, of which one may be the gateway.
        for number in 0..7 {
            cluster.create_vm(&virtual_machine(&format!("vm{number}"), &[("blue", "full")])).await?;
        }
        let mut full = None;
        for number in 0..7 {
            let name = format!("vm{number}.blue");
            let claim =
                cluster.wait_for_claim(&name, |claim| super::condition(claim)["reason"].is_string()).await?;
            if addresses(&claim).is_empty() {
                full = Some(name);
            }
        }
        let full = full.context("all machines have an address")?;
        let message = cluster.wait_for_failure(&full, "SubnetExhausted").await?;
        ensure!(message.starts_with("network \"full\" has no free IPv4 address left"), "{message}");
        let other = (0..7).map(|number| format!("vm{number}")).find(|vm| !full.starts_with(vm.as_str()));
        cluster.delete(&vms(), &other.context("another machine")?, &DeleteParams::background()).await?;
        cluster.wait_for_addresses(&full, 1).await?;
        Ok(())
    };
    outcome.await.with_context(|| replica.tail())
}
