//! A node's components and configuration files, all on their default paths.

use std::{fs, os::unix::fs::PermissionsExt as _, path::Path};

use anyhow::{Context as _, Result};
use serde_json::json;

use crate::{
    address::{API_PORT, CONTROL_PLANE, DNS_SERVICE, NodeAddresses, PODS},
    control_plane::{api_server_url, component, multus_token, write_host_files},
    image::LAB_IMAGE,
    init::Component,
    machine::Machine,
    pki::{CertSubject, Pki, write_secret},
    program::{CNI_PLUGINS, Programs},
};

const SERVICE_ACCOUNT_DIR: &str = "/run/secrets/kubernetes.io/serviceaccount";

/// Writes certificates, kubeconfigs, configuration and CNI plugins to the node's disk.
pub fn configure(machine: &Machine, node: NodeAddresses, pki: &Pki, programs: &Programs) -> Result<()> {
    let name = &machine.name;
    let file = format!("kubelet-{name}");
    let user = format!("system:node:{name}");
    let subject =
        CertSubject { user: &user, group: Some("system:nodes"), names: &[name], addresses: &node.node_ips() };
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
        fs::create_dir_all(disk.join(dir)).with_context(|| format!("create /{dir} of {name}"))?;
    }
    let kubernetes = etc.join("kubernetes");
    write_secret(&kubernetes.join("kubelet.conf"), &pki.kubeconfig(&file, &api_server_url())?)?;
    write_secret(&kubernetes.join("kube-proxy.conf"), &pki.kubeconfig("kube-proxy", &api_server_url())?)?;
    write_secret(&kubernetes.join("kubelet.yaml"), &kubelet_config(machine)?)?;
    for (from, to) in [
        ("ca.crt", "ca.crt"),
        (&format!("{file}.crt"), "kubelet.crt"),
        (&format!("{file}.key"), "kubelet.key"),
    ] {
        let text = fs::read_to_string(pki.dir().join(from)).with_context(|| format!("read {from}"))?;
        write_secret(&kubernetes.join(to), &text)?;
    }
    write_secret(&kubernetes.join("multus.token"), &multus_token(pki)?)?;
    write_secret(&etc.join("containerd/config.toml"), &containerd_config())?;
    write_secret(&etc.join("cni/net.d/10-lab.conflist"), &primary_network(node)?)?;
    write_secret(&etc.join("cni/net.d/multus.d/daemon-config.json"), &multus_config()?)?;
    for plugin in CNI_PLUGINS {
        install(&programs.path(plugin)?, &disk.join("opt/cni/bin").join(plugin))?;
    }
    Ok(())
}

/// Writes the files below `/run`, which do not survive a reboot.
pub fn write_run_files(machine: &Machine) -> Result<()> {
    machine.output(&["mkdir", "-p", SERVICE_ACCOUNT_DIR])?;
    machine.output(&["cp", "/etc/kubernetes/multus.token", &format!("{SERVICE_ACCOUNT_DIR}/token")])?;
    machine.output(&["cp", "/etc/kubernetes/ca.crt", &format!("{SERVICE_ACCOUNT_DIR}/ca.crt")]).map(|_| ())
}

fn install(from: &Path, to: &Path) -> Result<()> {
    if to.exists() {
        return Ok(());
    }
    let partial = to.with_extension("partial");
    fs::copy(from, &partial).with_context(|| format!("copy {}", from.display()))?;
    fs::set_permissions(&partial, fs::Permissions::from_mode(0o755)).context("make it executable")?;
    fs::rename(&partial, to).with_context(|| format!("rename to {}", to.display()))
}

/// The components of a node in start order. Only containerd starts without the API server.
pub fn components(machine: &Machine, node: NodeAddresses) -> [Component; 4] {
    [containerd(), kubelet(machine, node), kube_proxy(machine), multus(machine)]
}

fn containerd() -> Component {
    component("containerd", ["containerd".to_owned()])
}

fn kubelet(machine: &Machine, node: NodeAddresses) -> Component {
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
            // The conntrack limit belongs to the host, not to the node.
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

fn kubelet_config(machine: &Machine) -> Result<String> {
    let config = json!({
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
        "cgroupRoot": machine.cgroup.root(),
        "failCgroupV1": false,
        "failSwapOn": false,
        "makeIPTablesUtilChains": false,
        "localStorageCapacityIsolation": false,
        "maxPods": 250,
        "serializeImagePulls": false,
        // Nodes share the host's disk and memory; the kubelet must neither evict pods nor delete images.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "1Mi", "nodefs.available": "0%", "imagefs.available": "0%", "nodefs.inodesFree": "0%"},
    });
    serde_json::to_string_pretty(&config).context("serialize the kubelet's configuration")
}

fn containerd_config() -> String {
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

/// The primary network is routed, not bridged: pod-to-pod traffic of a node passes its IP stack, where kube-proxy's rules apply.
fn primary_network(node: NodeAddresses) -> Result<String> {
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
    serde_json::to_string_pretty(&config).context("serialize the primary network")
}

fn multus_config() -> Result<String> {
    let config = json!({
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
    serde_json::to_string_pretty(&config).context("serialize multus' configuration")
}
