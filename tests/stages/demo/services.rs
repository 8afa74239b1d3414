//! NetworkService: a DNS name for the addresses of pods on a secondary network.

use std::{fs, time::Duration};

use anyhow::Result;
use lab::{test_namespace::pod, wait};
use tokio::runtime::Runtime;

use super::Tour;

const NAME: &str = "web.default.svc.cluster.local";

const PODS: [&str; 4] = ["client", "web-0", "web-1", "web-2"];

/// Deletes what an earlier tour on the same lab may have left: its pods would keep the network of other chapters in use.
pub fn remove_leftovers(tour: &Tour) {
    let _ = tour.lab.kubectl(&["delete", "nsvc", "web", "--ignore-not-found"]);
    let _ = tour.lab.kubectl(&[&["delete", "pod", "--now", "--ignore-not-found"], &PODS[..]].concat());
}

/// Creates a service, resolves it, and lets a pod join by hot-plug.
pub fn chapter(tour: &Tour, runtime: &Runtime) -> Result<()> {
    super::chapter("Find pods on a network by name: NetworkService");
    let lab = &tour.lab;
    remove_leftovers(tour);
    let _ = lab.kubectl(&["delete", "bnet", "green", "--ignore-not-found", "--timeout=30s"]);
    let client = runtime.block_on(lab.client())?;
    tour.kubectl("apply -f docs/examples/green.yaml")?;
    runtime.block_on(e2e::bridge::wait_ready(&client, "green"))?;
    println!("Start two servers and a client on the network, and a server without it:");
    tour.attach("client", "node-1", "green")?;
    let server =
        |name: &str, node: &str| pod(name).on(node).label("app", "web").command(&["tool", "echo", "8080"]);
    for (name, node) in [("web-0", "node-1"), ("web-1", "node-2")] {
        let attached = server(name, node).annotation("k8s.v1.cni.cncf.io/networks", "green");
        tour.create_pod(name, node, "green", &attached.object().to_string())?;
    }
    println!("$ kubectl create -f web-2.json      # on node-1");
    tour.create(&server("web-2", "node-1").object().to_string())?;
    tour.kubectl("wait pod/client pod/web-0 pod/web-1 pod/web-2 --for=condition=Ready --timeout=60s")?;

    println!("Create a service for the servers on this network:\n");
    print!("{}", fs::read_to_string(e2e::repository().join("docs/examples/service.yaml"))?);
    tour.kubectl("apply -f docs/examples/service.yaml")?;
    tour.kubectl("wait nsvc/web --for=condition=Ready --timeout=60s")?;
    tour.kubectl("get nsvc web")?;
    tour.kubectl("get service web")?;
    println!("Its EndpointSlices have only addresses of the network, and DNS answers with them:");
    tour.kubectl("get endpointslices -l kubernetes.io/service-name=web")?;
    wait_resolved(tour, runtime, "web-0.web", 1)?;
    tour.kubectl(&format!("exec client -- nslookup -type=a {NAME}"))?;
    tour.kubectl(&format!("exec client -- nslookup -type=srv _http._tcp.{NAME}"))?;
    println!("Connect by name. The server replies with its name and the client's address on the network:");
    tour.kubectl(&format!("exec client -- tool send tcp {NAME}:8080 hello"))?;
    tour.kubectl(&format!("exec client -- tool send tcp web-1.{NAME}:8080 hello"))?;

    println!(
        "Plug the network into the third server. It joins the service, although its readiness does not change:"
    );
    tour.kubectl("patchbay plug web-2 --network green")?;
    wait_resolved(tour, runtime, "web-2.web", 1)?;
    tour.kubectl(&format!("exec client -- nslookup -type=a web-2.{NAME}"))?;
    println!("The counts in the status follow within 5 s:");
    tour.kubectl("wait nsvc/web --for=jsonpath={.status.endpoints.summary}=6/6 --timeout=30s")?;
    tour.kubectl("get nsvc")?;

    println!("Convert an object of the NetService controller:");
    tour.kubectl("patchbay convert -f docs/examples/netservice.yaml")?;
    tour.kubectl("delete nsvc web")?;
    tour.kubectl(&format!("delete pod {} --now", PODS.join(" ")))?;
    tour.kubectl("delete bnet green --timeout=30s")
}

/// Waits until a name has this many IPv4 addresses: DNS answers follow EndpointSlices within some seconds.
fn wait_resolved(tour: &Tour, runtime: &Runtime, name: &str, count: usize) -> Result<()> {
    let full = format!("{name}.default.svc.cluster.local");
    let what = format!("{full} to resolve");
    runtime.block_on(wait::until(Duration::from_secs(30), &what, || async {
        let answer = tour.lab.kubectl(&["exec", "client", "--", "nslookup", "-type=a", &full])?;
        Ok((answer.matches("Address: ").count() >= count).then_some(()))
    }))
}
