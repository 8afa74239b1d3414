//! A node's components and configuration files, all on their default paths.

use std::{
    fs,
    os::unix::{fs::PermissionsExt as _, net::UnixStream},
    path::Path,
};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use crate::{
    address::{API_PORT, CONTROL_PLANE, DNS_SERVICE, NodeAddresses, PODS},
    control_plane::{api_server_url, component, multus_token, write_host_files},
    init::Component,
    lab_record::NodeRecord,
    machine::Machine,
    node_options::{Multus, Runtime},
    pki::{CertSubject, Pki, write_secret},
    program::{CNI_PLUGINS, Programs},
};

const SERVICE_ACCOUNT_DIR: &str = "/run/secrets/kubernetes.io/serviceaccount";
/// The configuration of the primary network, in the directory of the runtime. It is no list: multus 4.2 and 4.3 run the DEL of
/// a list in a file without the keys of its plugins, so that host-local would not release the address.
const PRIMARY_NETWORK_FILE: &str = "10-lab.conf";
/// Starts the daemon of multus in a container of its own, with the mounts of the stock DaemonSet.
const MULTUS_CONTAINER: &str = "/opt/lab/multus-container";
/// The files of the ConfigMap that only the container of multus mounts.
const MULTUS_CONFIG_MAP: &str = "/opt/lab/multus-daemon-config";
/// The root of its mount namespace is its own, as of an image. The daemon changes its root to `/hostroot`, where the root of
/// the node is then, while a plugin runs.
const MULTUS_CONTAINER_SCRIPT: &str = r#"#!/bin/sh -e
root=/run/lab/multus
mkdir -p $root /run/netns /run/k8s.cni.cncf.io /var/lib/cni/multus /etc/cni/multus/net.d
mount -t tmpfs -o mode=0755 tmpfs $root
cd $root
bind() {
    mkdir -p "./$2"
    mount --rbind "$1" "./$2"
}
bind /run host/run
bind /etc/cni/net.d host/etc/cni/net.d
for dir in dev etc/cni/multus/net.d opt/cni/bin proc run/k8s.cni.cncf.io run/netns run/secrets sys var/lib/cni/multus var/lib/kubelet; do
    bind /$dir $dir
done
bind CONFIG_MAP etc/cni/net.d/multus.d
ln -s /run var/run
echo root:x:0:0:root:/root:/bin/sh >etc/passwd
mkdir -p hostroot tmp usr/src/multus-cni/bin
touch usr/src/multus-cni/bin/multus-daemon
mount --bind "$(readlink -f "$(command -v multus-daemon)")" usr/src/multus-cni/bin/multus-daemon
pivot_root . hostroot
cd /
exec /usr/src/multus-cni/bin/multus-daemon
"#;

/// Writes certificates, kubeconfigs, configuration and CNI plugins to the node's disk.
pub fn configure(machine: &Machine, record: &NodeRecord, pki: &Pki, programs: &Programs) -> Result<()> {
    let node = record.addresses();
    let name = &machine.name;
    let file = format!("kubelet-{name}");
    let user = format!("system:node:{name}");
    let subject =
        CertSubject { user: &user, group: Some("system:nodes"), names: &[name], addresses: &node.node_ips() };
    pki.certificate("ca", &file, &subject)?;

    let disk = machine.disk();
    let etc = disk.join("etc");
    write_host_files(&etc, name)?;
    let dirs =
        ["etc/kubernetes", "etc/cni/net.d", "opt/cni/bin", "var/lib/kubelet", "var/lib/cni", "var/log/pods"];
    for dir in dirs {
        fs::create_dir_all(disk.join(dir)).with_context(|| format!("create /{dir} of {name}"))?;
    }
    let kubernetes = etc.join("kubernetes");
    write_secret(&kubernetes.join("kubelet.conf"), &pki.kubeconfig(&file, &api_server_url())?)?;
    write_secret(&kubernetes.join("kube-proxy.conf"), &pki.kubeconfig("kube-proxy", &api_server_url())?)?;
    write_secret(&kubernetes.join("kubelet.yaml"), &kubelet_config(machine, record.options.runtime)?)?;
    for (from, to) in [
        ("ca.crt", "ca.crt"),
        (&format!("{file}.crt"), "kubelet.crt"),
        (&format!("{file}.key"), "kubelet.key"),
    ] {
        let text = fs::read_to_string(pki.dir().join(from)).with_context(|| format!("read {from}"))?;
        write_secret(&kubernetes.join(to), &text)?;
    }
    record.options.runtime.configure(&disk)?;
    write_secret(&etc.join("cni/net.d").join(PRIMARY_NETWORK_FILE), &to_text(&primary_network(node))?)?;
    configure_multus(record, &disk, pki)?;
    for plugin in CNI_PLUGINS.iter().chain(multus_plugins(record.options.multus)) {
        install(&programs.path(plugin)?, &disk.join("opt/cni/bin").join(plugin))?;
    }
    Ok(())
}

/// The programs of multus in `/opt/cni/bin`.
fn multus_plugins(multus: Multus) -> &'static [&'static str] {
    match multus {
        Multus::Thick => &["multus-shim"],
        Multus::Thin => &["multus"],
        Multus::None => &[],
    }
}

fn configure_multus(record: &NodeRecord, disk: &Path, pki: &Pki) -> Result<()> {
    let net_d = disk.join("etc/cni/net.d");
    match record.options.multus {
        Multus::Thick => {
            write_secret(&disk.join("etc/kubernetes/multus.token"), &multus_token(pki)?)?;
            let config_map = disk.join(&MULTUS_CONFIG_MAP[1..]);
            fs::create_dir_all(&config_map).context("create the directory of multus' ConfigMap")?;
            let config = config_map.join("daemon-config.json");
            // A test may have changed it, and starts the lab again.
            if !config.exists() {
                write_secret(&config, &to_text(&multus_config())?)?;
            }
            let container = disk.join(&MULTUS_CONTAINER[1..]);
            write_secret(&container, &MULTUS_CONTAINER_SCRIPT.replace("CONFIG_MAP", MULTUS_CONFIG_MAP))?;
            fs::set_permissions(&container, fs::Permissions::from_mode(0o755)).context("make it executable")
        }
        Multus::Thin => {
            fs::create_dir_all(net_d.join("multus.d")).context("create multus' directory")?;
            let kubeconfig = pki.token_kubeconfig("multus", &multus_token(pki)?, &api_server_url())?;
            write_secret(&net_d.join("multus.d/multus.kubeconfig"), &kubeconfig)?;
            write_secret(&net_d.join(THIN_MULTUS_FILE), &to_text(&thin_multus_config(record.addresses()))?)
        }
        Multus::None => Ok(()),
    }
}

/// The file that makes multus the runtime's network, on a node with the thin one. Its installer writes a conflist where
/// the primary network has the CNI version 1.0.0.
const THIN_MULTUS_FILE: &str = "00-multus.conflist";

/// Whether multus can serve the runtime.
pub fn multus_is_ready(machine: &Machine, multus: Multus) -> Result<bool> {
    let init = machine.init().with_context(|| format!("{} is off", machine.name))?;
    let root = Path::new("/proc").join(init.to_string()).join("root");
    let configured = |file: &str| root.join("etc/cni/net.d").join(file).exists();
    Ok(match multus {
        // A killed daemon leaves its socket file behind, so connect to it.
        Multus::Thick => {
            configured("00-multus.conf") && UnixStream::connect(root.join("run/multus/multus.sock")).is_ok()
        }
        Multus::Thin => configured(THIN_MULTUS_FILE),
        Multus::None => true,
    })
}

/// Writes the files below `/run`, which do not survive a reboot.
pub fn write_run_files(machine: &Machine, record: &NodeRecord) -> Result<()> {
    if record.options.multus != Multus::Thick {
        return Ok(());
    }
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

/// The components of a node in start order. Only the runtime, the first, starts without the API server.
pub fn components(machine: &Machine, record: &NodeRecord) -> Vec<Component> {
    let mut components =
        vec![record.options.runtime.component(), kubelet(machine, record.addresses()), kube_proxy(machine)];
    if record.options.multus == Multus::Thick {
        components.push(multus(machine));
    }
    components
}

pub fn kubelet(machine: &Machine, node: NodeAddresses) -> Component {
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
        ["unshare", "--mount", "--propagation=slave", MULTUS_CONTAINER].map(str::to_owned),
    );
    multus.environment = [
        ("KUBERNETES_SERVICE_HOST".to_owned(), CONTROL_PLANE.0.to_string()),
        ("KUBERNETES_SERVICE_PORT".to_owned(), API_PORT.to_string()),
        ("MULTUS_NODE_NAME".to_owned(), machine.name.clone()),
    ]
    .into();
    multus
}

fn kubelet_config(machine: &Machine, runtime: Runtime) -> Result<String> {
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
        "containerRuntimeEndpoint": format!("unix://{}", runtime.socket()),
        "clusterDomain": "cluster.local",
        "clusterDNS": [DNS_SERVICE],
        "resolvConf": "/etc/resolv.conf",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": machine.cgroup.root(),
        "failCgroupV1": false,
        "failSwapOn": false,
        "makeIPTablesUtilChains": false,
        "localStorageCapacityIsolation": false,
        "maxPods": 600,
        "serializeImagePulls": false,
        // Nodes share the host's disk and memory; the kubelet must neither evict pods nor delete images.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "1Mi", "nodefs.available": "0%", "imagefs.available": "0%", "nodefs.inodesFree": "0%"},
    });
    to_text(&config)
}

/// The primary network is routed, not bridged: pod-to-pod traffic of a node passes its IP stack, where kube-proxy's rules apply.
fn primary_network(node: NodeAddresses) -> Value {
    json!({
        "cniVersion": "1.0.0",
        "name": "lab",
        "type": "ptp",
        "mtu": 1500,
        "ipam": {
            "type": "host-local",
            "dataDir": "/var/lib/cni/networks",
            "ranges": [[{"subnet": node.pods_v4()}], [{"subnet": node.pods_v6()}]],
            "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
        },
    })
}

/// The delegate is the whole primary network, as multus' installer writes it.
fn thin_multus_config(node: NodeAddresses) -> Value {
    json!({
        "cniVersion": "1.0.0",
        "name": "multus-cni-network",
        "plugins": [{
            "type": "multus",
            "logLevel": "verbose",
            "logToStderr": false,
            "logFile": "/var/log/lab/multus.log",
            "kubeconfig": "/etc/cni/net.d/multus.d/multus.kubeconfig",
            "delegates": [primary_network(node)],
        }],
    })
}

/// As in the stock DaemonSet, but for the version of CNI.
fn multus_config() -> Value {
    json!({
        "chrootDir": "/hostroot",
        "cniVersion": "1.0.0",
        "logLevel": "verbose",
        "logToStderr": true,
        "cniConfigDir": "/host/etc/cni/net.d",
        "multusAutoconfigDir": "/host/etc/cni/net.d",
        "multusConfigFile": "auto",
        "socketDir": "/host/run/multus/",
    })
}

fn to_text(config: &Value) -> Result<String> {
    serde_json::to_string_pretty(config).context("serialize a configuration")
}
