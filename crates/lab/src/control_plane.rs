//! The control plane's components, their command lines and configuration files.

use std::{collections::BTreeMap, fs, net::IpAddr, path::Path};

use anyhow::{Context as _, Result};

use crate::{
    address::{API_PORT, API_SERVICE, CONTROL_PLANE, PODS, SERVICES},
    init::{Component, OnExit},
    machine::Machine,
    pki::{CertSubject, Pki, write_secret},
};

/// The name of the control plane's machine.
pub const NAME: &str = "control-plane";
/// The directory of certificates and kubeconfigs inside the machine.
const ETC: &str = "/etc/kubernetes";
/// The user name of multus; the same as with its upstream manifests.
const MULTUS: &str = "system:serviceaccount:kube-system:multus";

/// Logs one line per request with user, verb, object and user agent, without bodies.
const AUDIT_POLICY: &str = r#"{"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"],
 "rules": [{"level": "Metadata"}]}"#;

const COREFILE: &str = "\
.:53 {
    errors
    health 127.0.0.1:8080
    ready 127.0.0.1:8181
    kubernetes cluster.local in-addr.arpa ip6.arpa {
        kubeconfig /etc/kubernetes/coredns.conf
        pods insecure
        ttl 5
    }
    cache 5
    loop
}
";

/// The URL of the API server inside the lab.
pub fn api_server_url() -> String {
    format!("https://{}:{API_PORT}", CONTROL_PLANE.0)
}

/// The bearer token of multus; generated on the first call.
pub fn multus_token(pki: &Pki) -> Result<String> {
    let path = pki.dir().join("multus.token");
    if let Ok(token) = fs::read_to_string(&path) {
        return Ok(token);
    }
    let token: String = fs::read_to_string("/proc/sys/kernel/random/uuid")?.trim().to_owned();
    write_secret(&path, &token)?;
    Ok(token)
}

/// Writes certificates to the lab's directory, kubeconfigs and configuration to the machine's disk.
pub fn configure(machine: &Machine, pki: &Pki) -> Result<()> {
    pki.create_cas()?;
    let (v4, v6) = CONTROL_PLANE;
    let service = |text: &str| text.parse::<IpAddr>().with_context(|| format!("address {text}"));
    let addresses = [
        v4.into(),
        v6.into(),
        "127.0.0.1".parse()?,
        "::1".parse()?,
        service(API_SERVICE.0)?,
        service(API_SERVICE.1)?,
    ];
    let names = [
        "kubernetes",
        "kubernetes.default",
        "kubernetes.default.svc",
        "kubernetes.default.svc.cluster.local",
        NAME,
    ];
    let serving = CertSubject { user: "kube-apiserver", group: None, names: &names, addresses: &addresses };
    pki.certificate("ca", "apiserver", &serving)?;
    let client = |user, group| CertSubject { user, group, names: &[], addresses: &[] };
    pki.certificate("ca", "admin", &client("lab-admin", Some("system:masters")))?;
    pki.certificate(
        "ca",
        "apiserver-kubelet-client",
        &client("kube-apiserver-kubelet-client", Some("system:masters")),
    )?;
    pki.certificate("ca", "controller-manager", &client("system:kube-controller-manager", None))?;
    pki.certificate("ca", "scheduler", &client("system:kube-scheduler", None))?;
    pki.certificate("ca", "kube-proxy", &client("system:kube-proxy", None))?;
    pki.certificate("ca", "coredns", &client("lab:coredns", None))?;
    pki.certificate("front-proxy-ca", "front-proxy-client", &client("front-proxy-client", None))?;

    let etc = machine.disk().join("etc");
    let dir = etc.join("kubernetes");
    fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
    for user in ["controller-manager", "scheduler", "coredns"] {
        write_secret(&dir.join(format!("{user}.conf")), &pki.kubeconfig(user, &api_server_url())?)?;
    }
    let tokens = format!("{},{MULTUS},multus,\"system:serviceaccounts\"\n", multus_token(pki)?);
    write_secret(&dir.join("tokens.csv"), &tokens)?;
    write_secret(&dir.join("audit.yaml"), AUDIT_POLICY)?;
    write_secret(&dir.join("Corefile"), COREFILE)?;
    write_host_files(&etc, NAME)
}

/// Writes the files of `/etc` that most programs expect on a host.
pub fn write_host_files(etc: &Path, hostname: &str) -> Result<()> {
    let files = [
        ("hostname", format!("{hostname}\n")),
        ("hosts", format!("127.0.0.1 localhost\n::1 localhost\n127.0.1.1 {hostname}\n")),
        (
            "passwd",
            "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
                .into(),
        ),
        ("group", "root:x:0:\nnogroup:x:65534:\n".into()),
        ("nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n".into()),
        ("resolv.conf", format!("nameserver {}\n", CONTROL_PLANE.0)),
        ("os-release", "NAME=lab\nID=lab\nPRETTY_NAME=\"Patchbay lab\"\n".into()),
    ];
    fs::create_dir_all(etc).with_context(|| format!("create {}", etc.display()))?;
    for (name, text) in files {
        fs::write(etc.join(name), text).with_context(|| format!("write /etc/{name}"))?;
    }
    let id = etc.join("machine-id");
    if !id.exists() {
        let uuid = fs::read_to_string("/proc/sys/kernel/random/uuid")?.replace('-', "");
        write_secret(&id, &uuid)?;
    }
    Ok(())
}

/// A component with this command line and no extra environment.
pub fn component(name: &str, command: impl IntoIterator<Item = String>) -> Component {
    Component {
        name: name.to_owned(),
        command: command.into_iter().collect(),
        environment: BTreeMap::new(),
        log: format!("/var/log/lab/{name}.log").into(),
        on_exit: OnExit::Stay,
    }
}

fn flags(program: &str, flags: &[(&str, String)]) -> Vec<String> {
    std::iter::once(program.to_owned())
        .chain(flags.iter().map(|(name, value)| format!("--{name}={value}")))
        .collect()
}

/// The path of a file with rights inside the machine.
pub fn kubernetes_file(name: &str) -> String {
    format!("{ETC}/{name}")
}

/// The path of a certificate or key inside the machine.
pub fn pki_file(name: &str) -> String {
    format!("{ETC}/pki/{name}")
}

/// The components that start first: neither needs the API server to be ready.
pub fn storage_and_api() -> [Component; 2] {
    [etcd(), apiserver()]
}

/// The components that need the API server.
pub fn controllers() -> [Component; 3] {
    [controller_manager(), scheduler(), coredns()]
}

fn etcd() -> Component {
    let url = "http://127.0.0.1:2379".to_owned();
    component(
        "etcd",
        flags(
            "etcd",
            &[
                ("data-dir", "/var/lib/etcd".into()),
                ("listen-client-urls", url.clone()),
                ("advertise-client-urls", url),
                ("listen-peer-urls", "http://127.0.0.1:2380".into()),
                // A lab survives a killed process, not a power failure of the host.
                ("unsafe-no-fsync", "true".into()),
                ("log-level", "warn".into()),
            ],
        ),
    )
}

fn apiserver() -> Component {
    component(
        "kube-apiserver",
        flags(
            "kube-apiserver",
            &[
                ("etcd-servers", "http://127.0.0.1:2379".into()),
                ("bind-address", "::".into()),
                ("advertise-address", CONTROL_PLANE.0.to_string()),
                ("secure-port", API_PORT.to_string()),
                ("service-cluster-ip-range", SERVICES.into()),
                ("allow-privileged", "true".into()),
                ("authorization-mode", "Node,RBAC".into()),
                ("enable-admission-plugins", "NodeRestriction".into()),
                ("client-ca-file", pki_file("ca.crt")),
                ("token-auth-file", format!("{ETC}/tokens.csv")),
                ("tls-cert-file", pki_file("apiserver.crt")),
                ("tls-private-key-file", pki_file("apiserver.key")),
                ("service-account-issuer", "https://kubernetes.default.svc".into()),
                ("service-account-key-file", pki_file("sa.pub")),
                ("service-account-signing-key-file", pki_file("sa.key")),
                ("kubelet-certificate-authority", pki_file("ca.crt")),
                ("kubelet-client-certificate", pki_file("apiserver-kubelet-client.crt")),
                ("kubelet-client-key", pki_file("apiserver-kubelet-client.key")),
                ("kubelet-preferred-address-types", "InternalIP".into()),
                ("requestheader-client-ca-file", pki_file("front-proxy-ca.crt")),
                ("requestheader-allowed-names", "front-proxy-client".into()),
                ("requestheader-username-headers", "X-Remote-User".into()),
                ("requestheader-group-headers", "X-Remote-Group".into()),
                ("requestheader-extra-headers-prefix", "X-Remote-Extra-".into()),
                ("proxy-client-cert-file", pki_file("front-proxy-client.crt")),
                ("proxy-client-key-file", pki_file("front-proxy-client.key")),
                // No kube-proxy runs in this network namespace: dial webhook Services at their endpoints.
                ("enable-aggregator-routing", "true".into()),
                ("audit-policy-file", format!("{ETC}/audit.yaml")),
                ("audit-log-path", AUDIT_LOG.into()),
                ("audit-log-maxsize", "500".into()),
                ("audit-log-maxbackup", "2".into()),
                ("profiling", "false".into()),
            ],
        ),
    )
}

/// The path of the API server's audit log inside the machine.
pub const AUDIT_LOG: &str = "/var/log/lab/audit.log";

fn controller_manager() -> Component {
    let config = format!("{ETC}/controller-manager.conf");
    component(
        "kube-controller-manager",
        flags(
            "kube-controller-manager",
            &[
                ("kubeconfig", config.clone()),
                ("authentication-kubeconfig", config.clone()),
                ("authorization-kubeconfig", config),
                ("leader-elect", "false".into()),
                ("bind-address", "127.0.0.1".into()),
                ("use-service-account-credentials", "true".into()),
                ("root-ca-file", pki_file("ca.crt")),
                ("service-account-private-key-file", pki_file("sa.key")),
                ("cluster-signing-cert-file", pki_file("ca.crt")),
                ("cluster-signing-key-file", pki_file("ca.key")),
                ("cluster-cidr", PODS.into()),
                ("allocate-node-cidrs", "false".into()),
                // Twice the interval at which kubelets renew their leases (10 s).
                ("node-monitor-grace-period", "20s".into()),
                ("node-monitor-period", "2s".into()),
                // Tests create Nodes without a kubelet and without conditions; they stay as they are.
                ("node-startup-grace-period", "24h".into()),
            ],
        ),
    )
}

fn scheduler() -> Component {
    let config = format!("{ETC}/scheduler.conf");
    component(
        "kube-scheduler",
        flags(
            "kube-scheduler",
            &[
                ("kubeconfig", config.clone()),
                ("authentication-kubeconfig", config.clone()),
                ("authorization-kubeconfig", config),
                ("leader-elect", "false".into()),
                ("bind-address", "127.0.0.1".into()),
            ],
        ),
    )
}

fn coredns() -> Component {
    component("coredns", ["coredns".to_owned(), "-conf".to_owned(), format!("{ETC}/Corefile")])
}
