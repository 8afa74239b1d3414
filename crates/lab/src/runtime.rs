//! The container runtimes of nodes: their configuration files, and importing images into them.

use std::{
    fs::{self, File},
    io::{Read as _, Seek as _, SeekFrom},
    os::unix::{fs::PermissionsExt as _, net::UnixStream},
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;

use crate::{
    control_plane::component,
    image::LAB_IMAGE,
    init::{Component, PATH},
    machine::Machine,
    node_options::Runtime,
    pki::write_secret,
};

/// Accepts unsigned images.
const POLICY: &str = r#"{"default": [{"type": "insecureAcceptAnything"}]}"#;

/// For skopeo; CRI-O's own configuration repeats it. The driver is vfs: overlay mounts would outlive a killed node.
const STORAGE: &str = r#"[storage]
driver = "vfs"
runroot = "/run/containers/storage"
graphroot = "/var/lib/containers/storage"
"#;

/// Runs runc with no negative OOM score, as containerd's `restrict_oom_score_adj` does: the host may not have
/// CAP_SYS_RESOURCE, and CRI-O has no such setting.
const RUNC_WRAPPER: &str = r#"#!/bin/sh
previous=
for argument in "$@"; do
    if [ "$previous" = --bundle ]; then
        sed -i 's/"oomScoreAdj": *-[0-9]*/"oomScoreAdj":0/' "$argument/config.json" || exit 1
    fi
    previous=$argument
done
exec /usr/sbin/runc "$@"
"#;
const RUNC_WRAPPER_PATH: &str = "/opt/lab/runc";

impl Runtime {
    pub fn component(self) -> Component {
        match self {
            Self::Containerd => component("containerd", ["containerd".to_owned()]),
            Self::CriO => component("crio", ["crio".to_owned()]),
        }
    }

    /// The path of its CRI socket inside the node.
    pub fn socket(self) -> &'static str {
        match self {
            Self::Containerd => "/run/containerd/containerd.sock",
            Self::CriO => "/run/crio/crio.sock",
        }
    }

    /// Writes its configuration files to the node's disk.
    pub fn configure(self, disk: &Path) -> Result<()> {
        self.check_packages()?;
        let files = match self {
            Self::Containerd => vec![("etc/containerd/config.toml", containerd_config())],
            Self::CriO => vec![
                ("etc/crio/crio.conf.d/10-lab.conf", crio_config()),
                ("etc/containers/policy.json", POLICY.to_owned()),
                ("etc/containers/storage.conf", STORAGE.to_owned()),
                (&RUNC_WRAPPER_PATH[1..], RUNC_WRAPPER.to_owned()),
            ],
        };
        for (path, text) in files {
            let path = disk.join(path);
            let dir = path.parent().context("the file has no directory")?;
            fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
            write_secret(&path, &text)?;
            if text.starts_with("#!") {
                fs::set_permissions(&path, fs::Permissions::from_mode(0o755))
                    .context("make it executable")?;
            }
        }
        Ok(())
    }

    /// Fails if the host lacks a program that the runtime uses. Nodes share the host's `/usr`.
    fn check_packages(self) -> Result<()> {
        let programs: &[&str] = match self {
            Self::Containerd => return Ok(()),
            Self::CriO => &["/usr/sbin/runc", "/usr/bin/conmon", "/usr/bin/skopeo"],
        };
        match programs.iter().find(|program| !Path::new(program).exists()) {
            Some(missing) => bail!("{missing} does not exist; install its Debian package"),
            None => Ok(()),
        }
    }

    /// Whether it listens for CRI calls. A killed runtime leaves its socket file behind, so this connects to it.
    pub fn listens(self, machine: &Machine) -> Result<bool> {
        let init = machine.init().with_context(|| format!("{} is off", machine.name))?;
        Ok(UnixStream::connect(format!("/proc/{init}/root{}", self.socket())).is_ok())
    }

    /// Imports the images of an archive, which is a file of the host.
    pub fn import(self, machine: &Machine, archive: &Path) -> Result<()> {
        match self {
            Self::Containerd => {
                let mut ctr = machine.command("ctr")?;
                ctr.args(["-n", "k8s.io", "images", "import", "--local"]);
                // With its digest as a second name, an image has an image ID as if it had been pulled. KubeVirt starts
                // the target of a migration from the image ID of a disk.
                let names = image_names(archive).unwrap_or_default();
                if let [name] = &names[..]
                    && let Some((base, _)) = name.rsplit_once(':')
                {
                    ctr.args(["--digests", "--base-name", base]);
                }
                import_from_stdin(ctr.arg("-"), archive)
            }
            Self::CriO => image_names(archive)?.iter().try_for_each(|name| {
                let mut skopeo = machine.command("skopeo")?;
                skopeo.args(["copy", "--quiet", &format!("docker-archive:/dev/stdin:{name}")]);
                skopeo.arg(format!("containers-storage:{name}"));
                import_from_stdin(&mut skopeo, archive)
            }),
        }
        .with_context(|| format!("import {} on {}", archive.display(), machine.name))
    }
}

fn import_from_stdin(command: &mut Command, archive: &Path) -> Result<()> {
    let output = command
        .stdin(Stdio::from(File::open(archive)?))
        .output()
        .with_context(|| format!("run {command:?}"))?;
    if !output.status.success() {
        bail!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

/// The names of the images in a docker archive, from its `manifest.json`.
fn image_names(archive: &Path) -> Result<Vec<String>> {
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct ArchivedImage {
        #[serde(default)]
        repo_tags: Vec<String>,
    }
    let mut file = File::open(archive).with_context(|| format!("open {}", archive.display()))?;
    let mut header = [0_u8; 512];
    while file.read_exact(&mut header).is_ok() && header[0] != 0 {
        let text = |range: std::ops::Range<usize>| {
            String::from_utf8_lossy(&header[range]).trim_matches(['\0', ' ']).to_owned()
        };
        let size = u64::from_str_radix(&text(124..136), 8)
            .with_context(|| format!("{} is not a tar archive", archive.display()))?;
        if text(0..100) == "manifest.json" {
            let mut content = Vec::new();
            file.take(size).read_to_end(&mut content).context("read manifest.json")?;
            let images: Vec<ArchivedImage> =
                serde_json::from_slice(&content).context("parse manifest.json")?;
            return Ok(images.into_iter().flat_map(|image| image.repo_tags).collect());
        }
        let skipped = i64::try_from(size.next_multiple_of(512)).context("the file is too large")?;
        file.seek(SeekFrom::Current(skipped)).context("skip a file of the archive")?;
    }
    bail!("{} has no manifest.json; CRI-O nodes need a docker archive", archive.display())
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

/// An empty `clean_shutdown_file` keeps CRI-O from deleting its images after it was killed. NET_RAW is not among its own
/// default capabilities; test pods need it for ping, and have it with containerd.
fn crio_config() -> String {
    format!(
        r#"[crio]
root = "/var/lib/containers/storage"
runroot = "/run/containers/storage"
storage_driver = "vfs"
clean_shutdown_file = ""

[crio.api]
listen = "/run/crio/crio.sock"

[crio.runtime]
default_runtime = "runc"
cgroup_manager = "cgroupfs"
apparmor_profile = "unconfined"
pinns_path = "/usr/local/bin/pinns"
default_capabilities = ["CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "SETGID", "SETUID", "SETPCAP", "NET_BIND_SERVICE", "KILL", "NET_RAW"]

[crio.runtime.runtimes.runc]
runtime_path = "{RUNC_WRAPPER_PATH}"
runtime_root = "/run/runc"
monitor_path = "/usr/bin/conmon"
monitor_cgroup = "pod"
monitor_env = ["PATH={PATH}"]

[crio.image]
pause_image = "{LAB_IMAGE}"
pause_command = ""
signature_policy = "/etc/containers/policy.json"

[crio.network]
network_dir = "/etc/cni/net.d/"
plugin_dirs = ["/opt/cni/bin/"]

[crio.nri]
enable_nri = true
"#
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tar::TarBuilder;

    #[test]
    fn image_names_come_from_the_manifest_of_the_archive() {
        let path = std::env::temp_dir().join(format!("lab-image-names-{}.tar", std::process::id()));
        let mut tar = TarBuilder::default();
        tar.directory("blobs", 0o755).unwrap();
        tar.file("blobs/layer", 0o644, &[7; 700]).unwrap();
        tar.file("manifest.json", 0o644, br#"[{"RepoTags": ["a/b:1", "c:2"]}, {"Config": "x"}]"#).unwrap();
        fs::write(&path, tar.finish()).unwrap();
        let names = image_names(&path);
        fs::write(&path, TarBuilder::default().finish()).unwrap();
        let missing = image_names(&path);
        fs::remove_file(&path).unwrap();
        assert_eq!(names.unwrap(), ["a/b:1", "c:2"]);
        assert!(missing.unwrap_err().to_string().contains("no manifest.json"));
    }
}
