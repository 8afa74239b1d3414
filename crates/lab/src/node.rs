//! The programs of a node and their settings, all on their default paths.

use std::{fs, os::unix::fs::PermissionsExt as _, path::Path};

use anyhow::{Context as _, Result};
use serde_json::json;

use crate::{
    address::{API_PORT, CONTROL_PLANE, DNS_SERVICE, Node, PODS},
    control_plane::{component, multus_token, server, write_host_files},
    image::LAB_IMAGE,
    init::Component,
    machine::Machine,
    pki::{Pki, Subject, write_secret},
    program::{CNI_PLUGINS, Programs},
};

const SERVICE_ACCOUNT: &str = "/run/secrets/kubernetes.io/serviceaccount";

/// Certificates, kubeconfigs, settings and CNI plugins, written to the node's disk.
pub fn configure(machine: &Machine, node: Node, pki: &Pki, programs: &Programs) -> Result<()> {
    let name = &machine.name;
    let file = format!("kubelet-{name}");
    let user = format!("system:node:{name}");
    let subject =
        Subject { user: &user, group: Some("system:nodes"), names: &[name], addresses: &node.addresses() };
    pki.certificate("ca", &file, &subject)?;

    let disk = machine.disk();
    let etc = disk.join("etc");
    write_host_files(&etc, name)?;
    let dirs = [
        "etc/kubernetes",
        "etc/containerd",
        "etc/cni/net.d/multus.d",
        "opt/cni/bin",
        "var/lib/kubelet",
        "var/lib/containerd",
        "var/lib/cni/multus",
        "var/log/pods",
    ];
    for dir in dirs {
        fs::create_dir_all(disk.join(dir)).with_context(|| format!("make /{dir} of {name}"))?;
    }
    let kubernetes = etc.join("kubernetes");
    write_secret(&kubernetes.join("kubelet.conf"), &pki.kubeconfig(&file, &server())?)?;
    write_secret(&kubernetes.join("kube-proxy.conf"), &pki.kubeconfig("kube-proxy", &server())?)?;
    write_secret(&kubernetes.join("kubelet.yaml"), &kubelet_settings(machine)?)?;
    for (from, to) in [
        ("ca.crt", "ca.crt"),
        (&format!("{file}.crt"), "kubelet.crt"),
        (&format!("{file}.key"), "kubelet.key"),
    ] {
        let text = fs::read_to_string(pki.dir().join(from)).with_context(|| format!("read {from}"))?;
        write_secret(&kubernetes.join(to), &text)?;
    }
    write_secret(&kubernetes.join("multus.token"), &multus_token(pki)?)?;
    write_secret(&etc.join("containerd/config.toml"), &containerd_settings())?;
    write_secret(&etc.join("cni/net.d/10-lab.conflist"), &primary_network(node)?)?;
    write_secret(&etc.join("cni/net.d/multus.d/daemon-config.json"), &multus_settings()?)?;
    for plugin in CNI_PLUGINS {
        install(&programs.path(plugin)?, &disk.join("opt/cni/bin").join(plugin))?;
    }
    Ok(())
}

/// Files below `/run`, which a reboot takes away.
pub fn volatile(machine: &Machine) -> Result<()> {
    machine.output(&["mkdir", "-p", SERVICE_ACCOUNT])?;
    machine.output(&["cp", "/etc/kubernetes/multus.token", &format!("{SERVICE_ACCOUNT}/token")])?;
    machine.output(&["cp", "/etc/kubernetes/ca.crt", &format!("{SERVICE_ACCOUNT}/ca.crt")]).map(|_| ())
}

fn install(from: &Path, to: &Path) -> Result<()> {
    if to.exists() {
        return Ok(());
    }
    let partial = to.with_extension("partial");
    fs::copy(from, &partial).with_context(|| format!("copy {}", from.display()))?;
    fs::set_permissions(&partial, fs::Permissions::from_mode(0o755)).context("mark it executable")?;
    fs::rename(&partial, to).with_context(|| format!("put {} in place", to.display()))
}

/// What runs on a node, in the order in which it is started; multus needs the API server.
pub fn components(machine: &Machine, node: Node) -> [Component; 4] {
    [containerd(), kubelet(machine, node), kube_proxy(machine), multus(machine)]
}

fn containerd() -> Component {
    component("containerd", ["containerd".to_owned()])
}

fn kubelet(machine: &Machine, node: Node) -> Component {
    component(
        "kubelet",
        [
            "kubelet".to_owned(),
            "--config=/etc/kubernetes/kubelet.yaml".to_owned(),
            "--kubeconfig=/etc/kubernetes/kubelet.conf".to_owned(),
            format!("--hostname-override={}", machine.name),
            format!("--node-ip={},{}", node.v4(), node.v6()),
        ],
    )
}

fn kube_proxy(machine: &Machine) -> Component {
    component(
        "kube-proxy",
        [
            "kube-proxy".to_owned(),
            "--kubeconfig=/etc/kubernetes/kube-proxy.conf".to_owned(),
            "--proxy-mode=nftables".to_owned(),
            format!("--cluster-cidr={PODS}"),
            format!("--hostname-override={}", machine.name),
            // The limit is this machine's, not the node's.
            "--conntrack-max-per-core=0".to_owned(),
        ],
    )
}

fn multus(machine: &Machine) -> Component {
    let mut multus = component(
        "multus",
        ["multus-daemon".to_owned(), "-config=/etc/cni/net.d/multus.d/daemon-config.json".to_owned()],
    );
    multus.environment = [
        ("KUBERNETES_SERVICE_HOST".to_owned(), CONTROL_PLANE.0.to_string()),
        ("KUBERNETES_SERVICE_PORT".to_owned(), API_PORT.to_string()),
        ("MULTUS_NODE_NAME".to_owned(), machine.name.clone()),
    ]
    .into();
    multus
}

fn kubelet_settings(machine: &Machine) -> Result<String> {
    let settings = json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": false},
            "webhook": {"enabled": true},
            "x509": {"clientCAFile": "/etc/kubernetes/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": "/etc/kubernetes/kubelet.crt",
        "tlsPrivateKeyFile": "/etc/kubernetes/kubelet.key",
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "clusterDomain": "cluster.local",
        "clusterDNS": [DNS_SERVICE],
        "resolvConf": "/etc/resolv.conf",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": machine.group.root(),
        "failCgroupV1": false,
        "failSwapOn": false,
        "makeIPTablesUtilChains": false,
        "localStorageCapacityIsolation": false,
        "maxPods": 250,
        "serializeImagePulls": false,
        // Nodes share this machine's disk and memory: neither must make them evict or clean up.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "1Mi", "nodefs.available": "0%", "imagefs.available": "0%", "nodefs.inodesFree": "0%"},
    });
    serde_json::to_string_pretty(&settings).context("write the kubelet's settings")
}

fn containerd_settings() -> String {
    format!(
        r#"version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.erofs", "io.containerd.snapshotter.v1.blockfile", "io.containerd.tracing.processor.v1.otlp", "io.containerd.internal.v1.tracing"]

[plugins."io.containerd.cri.v1.runtime"]
restrict_oom_score_adj = true
disable_apparmor = true

[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["/opt/cni/bin"]
conf_dir = "/etc/cni/net.d"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{LAB_IMAGE}"
"#
    )
}

/// Routed, not bridged: traffic between two pods of a node then passes the node's IP stack, where kube-proxy sees it.
fn primary_network(node: Node) -> Result<String> {
    let config = json!({
        "cniVersion": "1.0.0",
        "name": "lab",
        "plugins": [{
            "type": "ptp",
            "mtu": 1500,
            "ipam": {
                "type": "host-local",
                "dataDir": "/var/lib/cni/networks",
                "ranges": [[{"subnet": node.pods_v4()}], [{"subnet": node.pods_v6()}]],
                "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
            },
        }],
    });
    serde_json::to_string_pretty(&config).context("write the primary network")
}

fn multus_settings() -> Result<String> {
    let settings = json!({
        "cniVersion": "1.0.0",
        "logLevel": "verbose",
        "logToStderr": true,
        "confDir": "/etc/cni/net.d",
        "cniConfigDir": "/etc/cni/net.d",
        "multusAutoconfigDir": "/etc/cni/net.d",
        "multusConfigFile": "auto",
        "socketDir": "/run/multus/",
        "binDir": "/opt/cni/bin",
    });
    serde_json::to_string_pretty(&settings).context("write multus' settings")
}
