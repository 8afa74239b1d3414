//! NetworkServices on two nodes: DNS answers of CoreDNS, and connections over the secondary network.

use std::{collections::BTreeSet, net::IpAddr};

use anyhow::{Context as _, Result, ensure};
use e2e::{
    bridge::{WAIT_TIMEOUT, attachment_for, delete_network, start_network, wait_deleted},
    command_line,
    dns::{AddressRecord, SrvRecord, full_name, wait_resolved, wait_srv},
    hotplug::LivePod,
    network_service::{
        addresses_on, create_network_service, create_service, network_services, services, slices,
        wait_condition, wait_ready, wait_ready_addresses,
    },
};
use futures::future::{try_join, try_join_all};
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
};
use lab::{
    Lab,
    test_namespace::{PodBuilder, TestNamespace, pod, with_namespace},
    wait,
};
use serde_json::{Value, json};

use crate::NODES;

const NETWORKS_ANNOTATION: &str = "k8s.v1.cni.cncf.io/networks";
/// Where the echo servers listen.
const PORT: u16 = 7000;

/// A pod with an echo server.
fn server(name: &str, node: &str) -> PodBuilder {
    pod(name).on(node).label("app", "web").command(&["tool", "echo", &PORT.to_string()])
}

fn attached(pod: PodBuilder, networks: &str) -> PodBuilder {
    pod.annotation(NETWORKS_ANNOTATION, networks)
}

/// The spec of a service for the echo servers.
fn web(network: &str) -> Value {
    json!({"network": network, "selector": {"app": "web"}, "ports": [{"name": "echo", "port": PORT}]})
}

/// The addresses of pods on a NAD of their namespace, of one family.
fn family(pods: &[&Pod], nad: &str, record: AddressRecord) -> Result<BTreeSet<IpAddr>> {
    let mut found = BTreeSet::new();
    for pod in pods {
        let nad = format!("{}/{nad}", pod.namespace().unwrap_or_default());
        found.extend(addresses_on(pod, &nad)?);
    }
    found.retain(|address| address.is_ipv4() == (record == AddressRecord::A));
    Ok(found)
}

async fn remove_network(ns: &TestNamespace, name: &str) -> Result<()> {
    // The network is deleted after its last pod.
    let params = DeleteParams::default().grace_period(0);
    ns.pods().delete_collection(&params, &ListParams::default()).await?;
    delete_network(&ns.client, name).await?;
    wait_deleted(&ns.client, name).await.map(drop)
}

pub async fn a_client_resolves_a_service_and_connects_over_the_secondary_network(lab: Lab) -> Result<()> {
    with_namespace(&lab, "service", async |ns: &TestNamespace| {
        let spec = json!({
            "overlay": {"vni": 90}, "attachment": attachment_for(ns),
            "ipam": {"subnets": ["10.90.0.0/24", "fd90::/64"]},
        });
        start_network(&ns.client, "svc", spec).await?;
        let mut spec = web("svc");
        spec["hostnames"] = json!("PodName");
        create_network_service(ns, "web", spec).await?;
        wait_condition(ns, "web", "Ready", "False", "NoPods").await?;
        let pods = [
            attached(server("server-1", NODES[0]), "svc"),
            attached(server("server-2", NODES[1]), "svc"),
            attached(pod("client").on(NODES[0]), "svc"),
            // It has the labels, but not the network.
            server("elsewhere", NODES[1]),
        ];
        let pods = try_join_all(pods.map(|pod| ns.start_pod(pod))).await?;
        let (servers, client) = ([&pods[0], &pods[1]], &pods[2]);
        wait_ready(ns, "web")?;
        let name = full_name(ns, "web");
        for record in [AddressRecord::A, AddressRecord::Aaaa] {
            let expected = family(&servers, "svc", record)?;
            ensure!(expected.len() == 2, "{expected:?}");
            wait_resolved(ns, "client", record, &name, &expected).await?;
            // Each pod has a name of its own.
            let own = full_name(ns, "server-1.web");
            wait_resolved(ns, "client", record, &own, &family(&[servers[0]], "svc", record)?).await?;
        }
        let target = |pod: &&Pod| full_name(ns, &format!("{}.web", pod.name_any()));
        let records = servers.iter().map(|pod| SrvRecord { port: PORT, target: target(pod) }).collect();
        wait_srv(ns, "client", &full_name(ns, "_echo._tcp.web"), &records).await?;

        // The server sees the client's address on the secondary network.
        let clients: BTreeSet<IpAddr> = addresses_on(client, &format!("{}/svc", ns.namespace))?;
        let mut destinations = vec![format!("{name}:{PORT}"), format!("{}:{PORT}", target(&servers[1]))];
        for record in [AddressRecord::A, AddressRecord::Aaaa] {
            let addresses = family(&servers, "svc", record)?;
            destinations.extend(addresses.iter().map(|ip| match ip {
                IpAddr::V4(ip) => format!("{ip}:{PORT}"),
                IpAddr::V6(ip) => format!("[{ip}]:{PORT}"),
            }));
        }
        for destination in destinations {
            let reply = wait::until(WAIT_TIMEOUT, &format!("a reply of {destination}"), || async {
                ns.exec("client", &["tool", "send", "tcp", &destination, "hello"]).map(Some)
            })
            .await?;
            let words: Vec<&str> = reply.split_whitespace().collect();
            let [host, peer, "hello"] = words[..] else { anyhow::bail!("{reply}") };
            let peer = peer.trim_start_matches("::ffff:").parse()?;
            ensure!(host.starts_with("server-") && clients.contains(&peer), "{destination}: {reply}");
        }
        for slice in slices(ns, "web").await? {
            let labels = slice.labels();
            ensure!(labels["endpointslice.kubernetes.io/managed-by"] == "networkservice.patchbay.dev");
            ensure!(labels.contains_key("service.kubernetes.io/headless"), "{labels:?}");
        }
        remove_network(ns, "svc").await
    })
    .await
}

pub async fn endpoints_follow_hot_plug_and_readiness(lab: Lab) -> Result<()> {
    with_namespace(&lab, "follow", async |ns: &TestNamespace| {
        let spec = json!({"attachment": attachment_for(ns), "ipam": {"subnets": ["10.91.0.0/24"]}});
        start_network(&ns.client, "follow", spec).await?;
        create_network_service(ns, "web", web("follow")).await?;
        let probed = server("probed", NODES[0])
            .command(&["sh", "-c", &format!("touch /tmp/ready; exec tool echo {PORT}")])
            .ready_if(&["cat", "/tmp/ready"]);
        let (plugged, probed) =
            try_join(ns.start_pod(server("plugged", NODES[0])), ns.start_pod(attached(probed, "follow")))
                .await?;
        let client = ns.start_pod(pod("client").on(NODES[1]));
        client.await?;
        let name = full_name(ns, "web");
        let stays = family(&[&probed], "follow", AddressRecord::A)?;
        wait_ready_addresses(ns, "web", &stays).await?;
        wait_resolved(ns, "client", AddressRecord::A, &name, &stays).await?;

        // A hot-plugged pod joins. Its readiness does not change.
        let before = ready_since(&plugged);
        let live = LivePod::find(ns, "plugged").await?;
        live.set_networks(&json!([{"name": "follow", "interface": "net1"}])).await?;
        live.wait_interfaces(&["net1"]).await?;
        let both = family(&[&probed, &live.object().await?], "follow", AddressRecord::A)?;
        ensure!(both.len() == 2, "{both:?}");
        wait_ready_addresses(ns, "web", &both).await?;
        wait_resolved(ns, "client", AddressRecord::A, &name, &both).await?;

        // A pod that is not ready leaves, and comes back.
        ns.exec("probed", &["rm", "/tmp/ready"])?;
        let plugged: BTreeSet<IpAddr> = both.difference(&stays).copied().collect();
        wait_ready_addresses(ns, "web", &plugged).await?;
        wait_resolved(ns, "client", AddressRecord::A, &name, &plugged).await?;
        ns.exec("probed", &["touch", "/tmp/ready"])?;
        wait_ready_addresses(ns, "web", &both).await?;

        // An unplugged pod leaves.
        live.set_networks(&json!([])).await?;
        wait_ready_addresses(ns, "web", &stays).await?;
        wait_resolved(ns, "client", AddressRecord::A, &name, &stays).await?;
        ensure!(before.is_some() && before == ready_since(&live.object().await?), "the readiness changed");
        remove_network(ns, "follow").await
    })
    .await
}

/// When the condition Ready of a pod last changed.
fn ready_since(pod: &Pod) -> Option<String> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let ready = conditions.iter().find(|condition| condition.type_ == "Ready")?;
    ready.last_transition_time.as_ref().map(|time| time.0.to_string())
}

pub async fn an_annotated_service_of_the_user_answers_with_names_by_the_subdomain_rule(
    lab: Lab,
) -> Result<()> {
    with_namespace(&lab, "annotated", async |ns: &TestNamespace| {
        let spec = json!({"attachment": attachment_for(ns), "ipam": {"subnets": ["10.92.0.0/24"]}});
        start_network(&ns.client, "annotated", spec).await?;
        let annotations =
            json!({"patchbay.dev/service-network": "annotated", "patchbay.dev/selector": "app in (web)"});
        let spec = json!({"clusterIP": "None", "ports": [{"name": "echo", "port": PORT}]});
        create_service(ns, "db", annotations, spec).await?;
        let pods = [
            attached(server("db-0", NODES[0]), "annotated").hostname("first", "db"),
            attached(server("db-1", NODES[0]), "annotated").hostname("second", "other"),
            pod("client").on(NODES[1]),
        ];
        let pods = try_join_all(pods.map(|pod| ns.start_pod(pod))).await?;
        let all = family(&[&pods[0], &pods[1]], "annotated", AddressRecord::A)?;
        wait_ready_addresses(ns, "db", &all).await?;
        wait_resolved(ns, "client", AddressRecord::A, &full_name(ns, "db"), &all).await?;
        let own = family(&[&pods[0]], "annotated", AddressRecord::A)?;
        wait_resolved(ns, "client", AddressRecord::A, &full_name(ns, "first.db"), &own).await?;
        wait_resolved(ns, "client", AddressRecord::A, &full_name(ns, "second.db"), &BTreeSet::new()).await?;

        // Without the annotations, the slices are removed.
        let patch = json!({"metadata": {"annotations": {
            "patchbay.dev/service-network": null, "patchbay.dev/selector": null,
        }}});
        services(ns).patch("db", &PatchParams::default(), &Patch::Merge(&patch)).await?;
        wait_ready_addresses(ns, "db", &BTreeSet::new()).await?;
        remove_network(ns, "annotated").await
    })
    .await
}

/// The manifests of the NetService controller: a NetService for each of two networks, and a Deployment whose pods use both.
fn netservice(name: &str, network: &str) -> String {
    format!(
        "apiVersion: svcctl.metaswitch.com/v1alpha1\nkind: NetService\nmetadata:\n  name: {name}\nspec:\n  \
         netAttachDef: {network}\n  selector:\n    app: utils\n---\n"
    )
}

fn deployment(networks_namespace: &str) -> Value {
    let networks = json!([
        {"name": "core", "namespace": networks_namespace, "interface": "core"},
        {"name": "access", "namespace": networks_namespace, "interface": "access"},
    ]);
    let mut template = pod("utils").object();
    template["metadata"] =
        json!({"labels": {"app": "utils"}, "annotations": {NETWORKS_ANNOTATION: networks.to_string()}});
    json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "utils"},
        "spec": {
            "replicas": 3, "selector": {"matchLabels": {"app": "utils"}},
            "template": {"metadata": template["metadata"], "spec": template["spec"]},
        },
    })
}

pub async fn converted_samples_of_the_netservice_controller_work(lab: Lab) -> Result<()> {
    with_namespace(&lab, "converted", async |ns: &TestNamespace| {
        // The NADs are in a namespace of their own, as in the samples.
        let networks = format!("{}-n", ns.namespace);
        let namespaces: Api<Namespace> = Api::all(ns.client.clone());
        let object = serde_json::from_value(json!({"metadata": {"name": networks}}))?;
        namespaces.create(&PostParams::default(), &object).await?;
        for (name, subnet, vni) in [("core", "10.93.0.0/24", 93), ("access", "10.94.0.0/24", 94)] {
            let attachment = json!({"namespaces": [networks]});
            let spec =
                json!({"overlay": {"vni": vni}, "attachment": attachment, "ipam": {"subnets": [subnet]}});
            start_network(&ns.client, name, spec).await?;
        }
        let samples = format!(
            "{}{}{}",
            netservice("corens", "core"),
            netservice("accessns", "access"),
            deployment(&networks)
        );
        let convert = ["convert", "-f", "-", "--network-namespace", &networks];
        let converted = command_line::run_with_input(ns, &convert, &samples)?;
        ensure!(converted.code == 0, "{}", converted.stderr);
        let file = lab.kubeconfig().with_file_name("converted.yaml");
        std::fs::write(&file, converted.stdout)?;
        let apply = ["-n", &ns.namespace, "apply", "-f", file.to_str().context("the path is not UTF-8")?];
        lab.kubectl(&apply)?;
        std::fs::write(&file, deployment(&networks).to_string())?;
        lab.kubectl(&apply)?;
        lab.kubectl(&["-n", &ns.namespace, "rollout", "status", "deployment/utils", "--timeout=90s"])?;
        let pods = ns.pods().list(&ListParams::default().labels("app=utils")).await?.items;
        ensure!(pods.len() == 3, "{} pods", pods.len());
        let client = pods[0].name_any();
        for (service, network) in [("corens", "core"), ("accessns", "access")] {
            wait_ready(ns, service)?;
            let mut expected = BTreeSet::new();
            for pod in &pods {
                expected.extend(addresses_on(pod, &format!("{networks}/{network}"))?);
            }
            ensure!(expected.len() == 3, "{expected:?}");
            wait_ready_addresses(ns, service, &expected).await?;
            wait_resolved(ns, &client, AddressRecord::A, &full_name(ns, service), &expected).await?;
            let template = services(ns).get_opt(&format!("{service}-template")).await?;
            ensure!(template.is_none(), "{template:?}");
        }
        lab.kubectl(&["-n", &ns.namespace, "delete", "deployment", "utils", "--wait=false"])?;
        ns.pods().delete_collection(&DeleteParams::default().grace_period(0), &ListParams::default()).await?;
        for name in ["core", "access"] {
            delete_network(&ns.client, name).await?;
            wait_deleted(&ns.client, name).await?;
        }
        namespaces.delete(&networks, &DeleteParams::default()).await.map(drop).map_err(Into::into)
    })
    .await
}

/// Lets a pod resolve a name without a pause.
fn start_resolving(ns: &TestNamespace, pod: &str, name: &str) -> Result<()> {
    // On a busy machine DNS may be slow; that is no gap.
    let query = format!(
        "out=$(nslookup -type=a {name}. 2>&1) && echo ok || case \"$out\" in *'timed out'*) echo slow;; *) echo gap;; esac"
    );
    let script = format!("(while sleep 0.1; do {query}; done) </dev/null >/tmp/answers 2>&1 &");
    ns.exec(pod, &["sh", "-c", &script]).map(drop)
}

/// Checks that the name always resolved, and goes on to for longer than CoreDNS caches an answer.
async fn check_no_gap(ns: &TestNamespace, pod: &str) -> Result<()> {
    let count = || -> Result<[usize; 2]> {
        let answers = ns.exec(pod, &["cat", "/tmp/answers"])?;
        Ok(["ok", "gap"].map(|word| answers.lines().filter(|line| *line == word).count()))
    };
    let [before, _] = count()?;
    let [answers, gaps] = wait::until(WAIT_TIMEOUT, "100 further answers", || async {
        Ok(Some(count()?).filter(|[answers, gaps]| answers + gaps >= before + 100))
    })
    .await?;
    println!("{answers} answers, {gaps} gaps");
    ensure!(gaps == 0, "{gaps} of {} queries had no answer", answers + gaps);
    Ok(())
}

/// What the NetService controller makes of a NetService: two Services and Endpoints, which the NetService controls.
fn create_netservice(
    ns: &TestNamespace,
    name: &str,
    network: &str,
    addresses: &BTreeSet<IpAddr>,
) -> Result<()> {
    let lab = &ns.lab;
    let crd = json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "netservices.svcctl.metaswitch.com"},
        "spec": {
            "group": "svcctl.metaswitch.com", "scope": "Namespaced",
            "names": {"kind": "NetService", "listKind": "NetServiceList", "plural": "netservices", "singular": "netservice"},
            "versions": [{"name": "v1alpha1", "served": true, "storage": true, "schema": {"openAPIV3Schema": {
                "type": "object", "x-kubernetes-preserve-unknown-fields": true,
            }}}],
        },
    });
    let file = lab.kubeconfig().with_file_name("netservice.yaml");
    let path = file.to_str().context("the path is not UTF-8")?.to_owned();
    let apply = |text: String| {
        std::fs::write(&file, text)?;
        lab.kubectl(&["-n", &ns.namespace, "apply", "-f", &path])
    };
    apply(crd.to_string())?;
    lab.kubectl(&[
        "wait",
        "--for=condition=Established",
        "crd/netservices.svcctl.metaswitch.com",
        "--timeout=30s",
    ])?;
    apply(netservice(name, network))?;
    let object = ["-n", &ns.namespace, "get", "netservice", name, "-o", "jsonpath={.metadata.uid}"];
    let owner = json!([{
        "apiVersion": "svcctl.metaswitch.com/v1alpha1", "kind": "NetService", "name": name,
        "uid": lab.kubectl(&object)?, "controller": true, "blockOwnerDeletion": true,
    }]);
    let metadata = |name: &str| json!({"name": name, "ownerReferences": owner});
    let template = format!("{name}-template");
    let addresses: Vec<Value> = addresses.iter().map(|ip| json!({"ip": ip})).collect();
    for object in [
        json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata(&template),
            "spec": {"clusterIP": "None", "selector": {"app": "utils"}}}),
        json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata(name), "spec": {"clusterIP": "None"}}),
        json!({"apiVersion": "v1", "kind": "Endpoints", "metadata": metadata(name),
            "subsets": [{"addresses": addresses}]}),
    ] {
        apply(object.to_string())?;
    }
    Ok(())
}

/// The steps of docs/from-netservice.md.
pub async fn a_service_of_the_netservice_controller_is_handed_over_without_a_dns_gap(lab: Lab) -> Result<()> {
    with_namespace(&lab, "handover", async |ns: &TestNamespace| {
        let spec = json!({"attachment": attachment_for(ns), "ipam": {"subnets": ["10.96.96.0/24"]}});
        start_network(&ns.client, "handover", spec).await?;
        let pods = [
            attached(pod("server").on(NODES[0]).label("app", "utils"), "handover"),
            pod("client").on(NODES[1]),
        ];
        let pods = try_join_all(pods.map(|pod| ns.start_pod(pod))).await?;
        let addresses = family(&[&pods[0]], "handover", AddressRecord::A)?;
        create_netservice(ns, "corens", "handover", &addresses)?;
        let name = full_name(ns, "corens");
        wait_resolved(ns, "client", AddressRecord::A, &name, &addresses).await?;
        start_resolving(ns, "client", &name)?;
        let before = services(ns).get("corens").await?.metadata.uid;

        let old = lab.kubectl(&["-n", &ns.namespace, "get", "netservices", "-o", "yaml"])?;
        let converted = command_line::run_with_input(ns, &["convert", "-f", "-"], &old)?;
        ensure!(converted.code == 0, "{}", converted.stderr);
        let file = lab.kubeconfig().with_file_name("handover.yaml");
        std::fs::write(&file, converted.stdout)?;
        lab.kubectl(&["apply", "-f", file.to_str().context("the path is not UTF-8")?])?;
        wait_condition(ns, "corens", "Ready", "False", "ServiceTaken").await?;
        let uid = network_services(ns).get("corens").await?.metadata.uid.context("no UID")?;
        let adopt = format!("patchbay.dev/adopt={uid}");
        lab.kubectl(&["-n", &ns.namespace, "annotate", "service", "corens", &adopt])?;
        wait_ready(ns, "corens")?;
        let (code, text) = command_line::run(ns, &["clean", "nsvc/corens", "--yes"])?;
        ensure!(code == 0 && text.contains("endpoints/corens deleted"), "{code}: {text}");
        lab.kubectl(&["-n", &ns.namespace, "delete", "netservice", "corens"])?;
        wait::until(WAIT_TIMEOUT, "the Service of the template to be deleted", || async {
            Ok(services(ns).get_opt("corens-template").await?.is_none().then_some(()))
        })
        .await?;
        wait_condition(ns, "corens", "ForeignEndpoints", "False", "").await?;
        wait_resolved(ns, "client", AddressRecord::A, &name, &addresses).await?;
        let after = services(ns).get("corens").await?.metadata.uid;
        ensure!(before.is_some() && before == after, "the Service was created again");
        check_no_gap(ns, "client").await?;
        remove_network(ns, "handover").await
    })
    .await
}

/// The steps of kubernetes/kubernetes#118376: a selector that is removed leaves slices with primary addresses.
pub async fn an_adopted_service_is_cleaned_of_endpoints_that_its_selector_left(lab: Lab) -> Result<()> {
    with_namespace(&lab, "adopted", async |ns: &TestNamespace| {
        let spec = json!({"attachment": attachment_for(ns), "ipam": {"subnets": ["10.95.0.0/24"]}});
        start_network(&ns.client, "adopted", spec).await?;
        let selecting = json!({"clusterIP": "None", "selector": {"app": "web"}, "ports": [{"name": "echo", "port": PORT}]});
        create_service(ns, "web", json!({}), selecting).await?;
        let pods = [attached(server("server", NODES[0]), "adopted"), pod("client").on(NODES[1])];
        let pods = try_join_all(pods.map(|pod| ns.start_pod(pod))).await?;
        let primary = pods[0].status.iter().filter_map(|status| status.pod_ip.as_deref());
        let primary: BTreeSet<IpAddr> = primary.map(str::parse).collect::<Result<_, _>>()?;
        let name = full_name(ns, "web");
        wait_resolved(ns, "client", AddressRecord::A, &name, &primary).await?;

        // The Service exists: it is taken over only with the annotation.
        let object = create_network_service(ns, "web", web("adopted")).await?;
        wait_condition(ns, "web", "Ready", "False", "ServiceTaken").await?;
        let (code, text) = command_line::run(ns, &["clean", "nsvc/web", "--yes"])?;
        ensure!(code == 1 && text.contains("not controlled by"), "{code}: {text}");
        start_resolving(ns, "client", &name)?;
        let before = services(ns).get("web").await?;
        let uid = object.metadata.uid.context("the NetworkService has no UID")?;
        let patch = json!({"metadata": {"annotations": {"patchbay.dev/adopt": uid}}});
        services(ns).patch("web", &PatchParams::default(), &Patch::Merge(&patch)).await?;
        wait_ready(ns, "web")?;
        wait_condition(ns, "web", "ForeignEndpoints", "True", "").await?;
        let after = services(ns).get("web").await?;
        ensure!(before.metadata.uid == after.metadata.uid, "the Service was created again");
        let selector = after.spec.and_then(|spec| spec.selector).unwrap_or_default();
        ensure!(selector.is_empty(), "{selector:?}");

        // The command only lists at first, and never touches Patchbay's own slices.
        let secondary = family(&[&pods[0]], "adopted", AddressRecord::A)?;
        let (code, text) = command_line::run(ns, &["clean", "nsvc/web"])?;
        ensure!(code == 0 && text.contains("endpoints/web") && text.contains("--yes"), "{code}: {text}");
        ensure!(text.contains("endpointslice-controller.k8s.io"), "{text}");
        ensure!(!text.contains("networkservice.patchbay.dev"), "{text}");
        let own = |all: &[k8s_openapi::api::discovery::v1::EndpointSlice]| -> BTreeSet<String> {
            let manager = "endpointslice.kubernetes.io/managed-by";
            let ours = all.iter().filter(|slice| slice.labels()[manager] == "networkservice.patchbay.dev");
            ours.filter_map(|slice| slice.metadata.uid.clone()).collect()
        };
        let kept = own(&slices(ns, "web").await?);
        let (code, text) = command_line::run(ns, &["clean", "nsvc/web", "--yes"])?;
        ensure!(code == 0, "{code}: {text}");
        wait_condition(ns, "web", "ForeignEndpoints", "False", "").await?;
        wait_ready_addresses(ns, "web", &secondary).await?;
        ensure!(own(&slices(ns, "web").await?) == kept && !kept.is_empty(), "{kept:?}");
        wait_resolved(ns, "client", AddressRecord::A, &name, &secondary).await?;
        let (code, text) = command_line::run(ns, &["clean", "nsvc/web"])?;
        ensure!(code == 0 && text.contains("no foreign endpoints"), "{code}: {text}");
        check_no_gap(ns, "client").await?;

        // The Service goes with its NetworkService.
        network_services(ns).delete("web", &DeleteParams::default()).await?;
        wait::until(WAIT_TIMEOUT, "the Service to be deleted", || async {
            Ok(services(ns).get_opt("web").await?.is_none().then_some(()))
        })
        .await?;
        remove_network(ns, "adopted").await
    })
    .await
}
