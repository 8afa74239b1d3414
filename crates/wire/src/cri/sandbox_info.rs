//! What containerd and CRI-O say about a sandbox in the verbose part of its status.
//!
//! CRI does not define this part. Both runtimes put JSON under the key `info`, with the OCI specification of the sandbox.
//! Only containerd adds its own metadata, which it has even if the specification is missing.

use std::{collections::BTreeMap, fmt};

use serde::Deserialize;

/// The key of the JSON in `info`.
const INFO: &str = "info";

/// What a runtime says about a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SandboxInfo {
    /// A process in the sandbox, on the host. `None` if the sandbox has none, or CRI-O runs it without one.
    pub pid: Option<u32>,
    pub network: SandboxNetwork,
    /// The type of the runtime, if containerd says it.
    pub runtime_type: Option<String>,
    /// The handler of the runtime class; `None` for the default one, or if the runtime does not say it.
    pub runtime_handler: Option<String>,
}

/// The network namespace of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SandboxNetwork {
    /// The namespace of the host.
    Host,
    /// A namespace with this path on the host.
    Path(String),
    /// A namespace without a path: that of the sandbox's process.
    OfProcess,
    /// The runtime has removed the namespace.
    Closed,
    /// The runtime does not say: the sandbox is not fully created, or its specification is gone.
    Unknown,
}

/// Why the verbose part of a status cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InfoError {
    /// The runtime did not send it.
    Missing,
    /// It has another format.
    Format(String),
}

impl fmt::Display for InfoError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => f.write_str("the runtime sent no verbose information about the sandbox"),
            Self::Format(cause) => {
                write!(f, "the runtime's information about the sandbox has an unknown format: {cause}")
            }
        }
    }
}

impl std::error::Error for InfoError {}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawInfo {
    pid: Option<i64>,
    net_namespace_closed: Option<bool>,
    runtime_type: Option<String>,
    runtime_handler: Option<String>,
    runtime_spec: Option<RuntimeSpec>,
    sandbox_metadata: Option<SandboxMetadata>,
}

/// The part of an OCI specification that is used.
#[derive(Deserialize)]
struct RuntimeSpec {
    linux: Option<LinuxSpec>,
    annotations: Option<CrioAnnotations>,
}

/// The annotations that CRI-O adds to a specification.
#[derive(Deserialize)]
struct CrioAnnotations {
    #[serde(rename = "io.kubernetes.cri-o.HostNetwork")]
    host_network: Option<String>,
    #[serde(rename = "io.kubernetes.cri-o.RuntimeHandler")]
    runtime_handler: Option<String>,
}

#[derive(Deserialize)]
struct LinuxSpec {
    namespaces: Option<Vec<LinuxNamespace>>,
}

#[derive(Deserialize)]
struct LinuxNamespace {
    #[serde(rename = "type", default)]
    kind: String,
    path: Option<String>,
}

/// The metadata of containerd, inside of an envelope with its version.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct SandboxMetadata {
    metadata: Option<ContainerdMetadata>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ContainerdMetadata {
    #[serde(rename = "NetNSPath")]
    netns_path: Option<String>,
    runtime_handler: Option<String>,
}

impl SandboxInfo {
    /// Parses `info` of a status.
    pub fn parse(info: &BTreeMap<String, String>) -> Result<Self, InfoError> {
        let text = info.get(INFO).ok_or(InfoError::Missing)?;
        if !text.trim_start().starts_with('{') {
            return Err(InfoError::Format("expected a JSON object".to_owned()));
        }
        let raw: RawInfo =
            serde_json::from_str(text).map_err(|error| InfoError::Format(error.to_string()))?;
        let metadata = raw.sandbox_metadata.and_then(|envelope| envelope.metadata);
        let (recorded, handler) =
            metadata.map_or((None, None), |metadata| (metadata.netns_path, metadata.runtime_handler));
        let filled = |text: Option<String>| text.filter(|text| !text.is_empty());
        let annotations = raw.runtime_spec.as_ref().and_then(|spec| spec.annotations.as_ref());
        let annotated = annotations.and_then(|annotations| annotations.runtime_handler.clone());
        let network = if raw.net_namespace_closed == Some(true) {
            SandboxNetwork::Closed
        } else {
            match (raw.runtime_spec, filled(recorded)) {
                (Some(spec), _) => spec.network(),
                (None, Some(path)) => SandboxNetwork::Path(path),
                (None, None) => SandboxNetwork::Unknown,
            }
        };
        Ok(Self {
            pid: raw.pid.and_then(|pid| u32::try_from(pid).ok()).filter(|&pid| pid != 0),
            network,
            runtime_type: filled(raw.runtime_type),
            runtime_handler: filled(raw.runtime_handler).or(filled(handler)).or(filled(annotated)),
        })
    }
}

impl RuntimeSpec {
    fn network(self) -> SandboxNetwork {
        // CRI-O gives a host-network sandbox a path as well: a mount of the host's own namespace.
        if self.annotations.is_some_and(|annotations| annotations.host_network.as_deref() == Some("true")) {
            return SandboxNetwork::Host;
        }
        let Some(namespaces) = self.linux.and_then(|linux| linux.namespaces) else {
            return SandboxNetwork::Unknown;
        };
        match namespaces.into_iter().find(|namespace| namespace.kind == "network") {
            None => SandboxNetwork::Host,
            Some(LinuxNamespace { path: Some(path), .. }) if !path.is_empty() => SandboxNetwork::Path(path),
            Some(_) => SandboxNetwork::OfProcess,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The layout of containerd 2.
    const CONTAINERD: &str = r#"{"pid":12345,"processStatus":"running","netNamespaceClosed":false,
        "image":"registry.k8s.io/pause:3.10","snapshotKey":"c0ffee","snapshotter":"overlayfs",
        "runtimeType":"io.containerd.runc.v2","runtimeOptions":{"systemd_cgroup":true},
        "config":{"metadata":{"name":"web","uid":"u","namespace":"default"},"linux":{"security_context":{"namespace_options":{"pid":1}}}},
        "runtimeSpec":{"ociVersion":"1.2.0","process":{"args":["/pause"]},"linux":{"resources":{},
            "namespaces":[{"type":"pid"},{"type":"ipc"},{"type":"uts"},{"type":"mount"},
                {"type":"network","path":"/var/run/netns/cni-5f3c1e7a-8f8e-1d5c-9a43-9a6b4d0c9f11"}]}},
        "cniResult":{"Interfaces":{"eth0":{"IPConfigs":[{"IP":"10.244.0.5","Gateway":"10.244.0.1"}]}}},
        "sandboxMetadata":{"Version":"v1","Metadata":{"ID":"c0ffee","Name":"web_default_u_0","Config":{},
            "NetNSPath":"/var/run/netns/cni-5f3c1e7a-8f8e-1d5c-9a43-9a6b4d0c9f11","IP":"10.244.0.5","AdditionalIPs":null,
            "RuntimeHandler":"","CNIResult":null,"ProcessLabel":""}}}"#;

    /// The layout of CRI-O with an infra container.
    const CRIO: &str = r#"{"image":"registry.k8s.io/pause:3.10","pid":4321,"runtimeSpec":{"ociVersion":"1.2.0",
        "annotations":{"io.kubernetes.cri-o.SandboxID":"c0ffee"},"linux":{"cgroupsPath":"kubepods.slice:crio:c0ffee",
            "namespaces":[{"type":"pid"},{"type":"network","path":"/var/run/netns/6d8c0b1e-3a54-4a9e-bb32-0d6a1c3b2f90"},
                {"type":"ipc","path":"/var/run/ipcns/6d8c0b1e"},{"type":"uts","path":"/var/run/utsns/6d8c0b1e"},{"type":"mount"}]}}}"#;

    /// What CRI-O 1.36 says about a sandbox without an infra container, shortened.
    const CRIO_WITHOUT_INFRA: &str = r#"{"runtimeSpec":{"ociVersion":"1.3.0","process":{"args":["/bin/tool","pause"],"oomScoreAdj":-998},
        "hostname":"c2","annotations":{"io.container.manager":"cri-o","io.kubernetes.container.name":"POD",
            "io.kubernetes.cri-o.ContainerType":"sandbox","io.kubernetes.cri-o.HostNetwork":"false","io.kubernetes.cri-o.IP.0":"10.244.2.2",
            "io.kubernetes.cri-o.SandboxID":"8ad635884fd9c3e55ef4de6e5ef83f01d3447332e00e9b714f6831d0277c0d6e",
            "io.kubernetes.cri-o.NamespaceOptions":"{\"pid\":1,\"userns_options\":{\"mode\":2}}"},
        "linux":{"cgroupsPath":"/kubepods/besteffort/podde5cbc27/8ad63588","namespaces":[{"type":"pid"},
            {"type":"network","path":"/var/run/netns/737600b0-4506-4126-8aa1-843553e72b6c"},
            {"type":"ipc","path":"/var/run/ipcns/737600b0-4506-4126-8aa1-843553e72b6c"},
            {"type":"uts","path":"/var/run/utsns/737600b0-4506-4126-8aa1-843553e72b6c"},{"type":"mount"}]}}}"#;

    fn parse(text: &str) -> Result<SandboxInfo, InfoError> {
        SandboxInfo::parse(&BTreeMap::from([(INFO.to_owned(), text.to_owned())]))
    }

    fn path(path: &str) -> SandboxNetwork {
        SandboxNetwork::Path(path.to_owned())
    }

    #[test]
    fn the_forms_of_containerd_are_parsed() {
        let netns = path("/var/run/netns/cni-5f3c1e7a-8f8e-1d5c-9a43-9a6b4d0c9f11");
        let running = SandboxInfo {
            pid: Some(12345),
            network: netns.clone(),
            runtime_type: Some("io.containerd.runc.v2".to_owned()),
            runtime_handler: None,
        };
        assert_eq!(parse(CONTAINERD), Ok(running.clone()));
        // Containerd 1 says the handler outside of the metadata, and has no metadata in older versions.
        let old = CONTAINERD.replace(r#""runtimeType""#, r#""runtimeHandler":"kata","runtimeType""#);
        assert_eq!(parse(&old).unwrap().runtime_handler.as_deref(), Some("kata"));
        let new = CONTAINERD.replace(r#""RuntimeHandler":"""#, r#""RuntimeHandler":"kata""#);
        assert_eq!(parse(&new).unwrap().runtime_handler.as_deref(), Some("kata"));

        let start = CONTAINERD.find(r#""runtimeSpec""#).unwrap();
        let end = CONTAINERD.find(r#""cniResult""#).unwrap();
        let without_spec = CONTAINERD.replace(&CONTAINERD[start..end], r#""runtimeSpec":null,"#);
        assert_eq!(parse(&without_spec), Ok(running));
        let nothing = r#"{"pid":0,"processStatus":"deleted","netNamespaceClosed":false,"runtimeSpec":null,"sandboxMetadata":null}"#;
        let unknown = SandboxInfo {
            pid: None,
            network: SandboxNetwork::Unknown,
            runtime_type: None,
            runtime_handler: None,
        };
        assert_eq!(parse(nothing), Ok(unknown));
        let closed = CONTAINERD.replace(r#""netNamespaceClosed":false"#, r#""netNamespaceClosed":true"#);
        assert_eq!(parse(&closed).unwrap().network, SandboxNetwork::Closed);
    }

    #[test]
    fn the_forms_of_cri_o_are_parsed() {
        let netns = path("/var/run/netns/6d8c0b1e-3a54-4a9e-bb32-0d6a1c3b2f90");
        let running =
            SandboxInfo { pid: Some(4321), network: netns, runtime_type: None, runtime_handler: None };
        assert_eq!(parse(CRIO), Ok(running.clone()));
        let without_infra = CRIO.replace(r#""image":"registry.k8s.io/pause:3.10","pid":4321,"#, "");
        assert_eq!(parse(&without_infra), Ok(SandboxInfo { pid: None, ..running }));
        // Older versions say nothing about a sandbox without an infra container.
        assert_eq!(parse("{}").unwrap().network, SandboxNetwork::Unknown);
    }

    #[test]
    fn a_host_network_sandbox_has_no_network_namespace() {
        for (namespaces, network) in [
            (r#"[{"type":"pid"}]"#, SandboxNetwork::Host),
            (r#"[{"type":"network"}]"#, SandboxNetwork::OfProcess),
            (r#"[{"type":"network","path":""}]"#, SandboxNetwork::OfProcess),
            (r#"[{"type":"network","path":"/run/netns/a"}]"#, path("/run/netns/a")),
            ("null", SandboxNetwork::Unknown),
        ] {
            let text = format!(r#"{{"pid":1,"runtimeSpec":{{"linux":{{"namespaces":{namespaces}}}}}}}"#);
            assert_eq!(parse(&text).unwrap().network, network, "{text}");
        }
        assert_eq!(parse(r#"{"runtimeSpec":{}}"#).unwrap().network, SandboxNetwork::Unknown);
    }

    #[test]
    fn a_host_network_sandbox_of_crio_has_the_path_of_the_hosts_namespace() {
        let netns = path("/var/run/netns/737600b0-4506-4126-8aa1-843553e72b6c");
        let pod = SandboxInfo { pid: None, network: netns, runtime_type: None, runtime_handler: None };
        assert_eq!(parse(CRIO_WITHOUT_INFRA), Ok(pod));
        let handler = r#"RuntimeHandler":"kata","io.kubernetes.cri-o.HostNetwork":"false""#;
        let kata = CRIO_WITHOUT_INFRA.replace(r#"HostNetwork":"false""#, handler);
        assert_eq!(parse(&kata).unwrap().runtime_handler.as_deref(), Some("kata"));
        let host = CRIO_WITHOUT_INFRA.replace(r#"HostNetwork":"false""#, r#"HostNetwork":"true""#);
        assert_eq!(parse(&host).unwrap().network, SandboxNetwork::Host);
    }

    #[test]
    fn information_in_another_format_is_an_error() {
        assert_eq!(SandboxInfo::parse(&BTreeMap::new()), Err(InfoError::Missing));
        for text in
            ["", "[]", "running", "{", r#"{"pid":"1"}"#, r#"{"runtimeSpec":{"linux":{"namespaces":{}}}}"#]
        {
            assert!(matches!(parse(text), Err(InfoError::Format(_))), "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_information_is_safe(text in any::<String>(), json in r#"\{[\[\]{}",:a-zA-Z0-9]{0,40}\}"#) {
            _ = parse(&text);
            _ = parse(&json);
        }
    }
}
