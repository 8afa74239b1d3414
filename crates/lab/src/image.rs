//! Builds container images without a container engine: one tar that is both an OCI layout and a docker archive.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

use crate::{
    digest::sha256_hex,
    kubevirt::LAUNCHER_IMAGE,
    machine::capture,
    paths,
    program::{LAUNCHER, Programs},
    tar::TarBuilder,
};

/// The image of test pods; also the sandbox image of the nodes.
pub const LAB_IMAGE: &str = "localhost/lab:1";

/// The contents of an image.
pub struct Image<'a> {
    /// The full reference with registry host: `localhost/lab:1`.
    pub reference: &'a str,
    /// The only layer, an uncompressed tar.
    pub layer: Vec<u8>,
    pub entrypoint: &'a [&'a str],
    pub environment: &'a [&'a str],
    pub user: &'a str,
    pub labels: BTreeMap<&'a str, &'a str>,
}

impl Image<'_> {
    /// The archive for `ctr images import` and `docker load`.
    pub fn pack(&self) -> Result<Vec<u8>> {
        let layer_digest = sha256_hex(&self.layer);
        let config = serde_json::to_vec(&json!({
            "architecture": architecture()?,
            "os": "linux",
            "config": {
                "Entrypoint": self.entrypoint,
                "Env": self.environment,
                "User": self.user,
                "WorkingDir": "/",
                "Labels": self.labels,
            },
            "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{layer_digest}")]},
            "history": [{"created_by": "lab image"}],
        }))?;
        let config_digest = sha256_hex(&config);
        let layer_type = "application/vnd.oci.image.layer.v1.tar";
        let manifest = serde_json::to_vec(&json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": descriptor("application/vnd.oci.image.config.v1+json", &config_digest, config.len()),
            "layers": [descriptor(layer_type, &layer_digest, self.layer.len())],
        }))?;
        let manifest_digest = sha256_hex(&manifest);
        let mut entry =
            descriptor("application/vnd.oci.image.manifest.v1+json", &manifest_digest, manifest.len());
        let tag = self.reference.rsplit_once(':').map_or("latest", |(_, tag)| tag);
        entry["annotations"] =
            json!({"io.containerd.image.name": self.reference, "org.opencontainers.image.ref.name": tag});
        let index = serde_json::to_vec(&json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.index.v1+json",
            "manifests": [entry],
        }))?;
        let docker = serde_json::to_vec(&json!([{
            "Config": format!("blobs/sha256/{config_digest}"),
            "RepoTags": [self.reference],
            "Layers": [format!("blobs/sha256/{layer_digest}")],
        }]))?;
        let mut tar = TarBuilder::default();
        tar.file("oci-layout", 0o644, br#"{"imageLayoutVersion":"1.0.0"}"#)?;
        tar.file("index.json", 0o644, &index)?;
        tar.file("manifest.json", 0o644, &docker)?;
        tar.directory("blobs", 0o755)?;
        tar.directory("blobs/sha256", 0o755)?;
        for (digest, content) in
            [(&layer_digest, &self.layer), (&config_digest, &config), (&manifest_digest, &manifest)]
        {
            tar.file(&format!("blobs/sha256/{digest}"), 0o644, content)?;
        }
        Ok(tar.finish())
    }
}

fn descriptor(kind: &str, digest: &str, size: usize) -> Value {
    json!({"mediaType": kind, "digest": format!("sha256:{digest}"), "size": size})
}

fn architecture() -> Result<&'static str> {
    match std::env::consts::ARCH {
        "x86_64" => Ok("amd64"),
        "aarch64" => Ok("arm64"),
        other => bail!("architecture {other} is not supported; use x86_64 or aarch64"),
    }
}

/// Builds the image of test pods unless it is cached.
pub fn lab_image(programs: &Programs) -> Result<PathBuf> {
    build_image(LAB_IMAGE, "lab", base_layer(programs)?)
}

/// Builds the image of launcher pods unless it is cached: the image of test pods, and stand-ins for KubeVirt's programs.
pub fn launcher_image(programs: &Programs) -> Result<PathBuf> {
    let launcher = fs::read(programs.path(LAUNCHER)?).context("read launcher")?;
    let mut layer = base_layer(programs)?;
    // An init container copies this one out of the image.
    layer.file("usr/bin/container-disk", 0o755, &launcher)?;
    layer.symlink("usr/bin/virt-launcher-monitor", "container-disk")?;
    layer.symlink("usr/bin/virt-tail", "container-disk")?;
    layer.symlink("usr/bin/cp", "/bin/busybox")?;
    build_image(LAUNCHER_IMAGE, "virt-launcher", layer)
}

/// Busybox, iproute2's `ip` with its libraries, and `tool`.
fn base_layer(programs: &Programs) -> Result<TarBuilder> {
    let busybox = fs::read("/bin/busybox").context("read /bin/busybox: install busybox-static")?;
    let ip = fs::read("/usr/sbin/ip").context("read /usr/sbin/ip: install iproute2")?;
    let tool = fs::read(programs.path("tool")?).context("read tool")?;
    let mut layer = TarBuilder::default();
    for dir in ["bin", "sbin", "etc", "tmp", "proc", "sys", "dev", "run", "usr", "usr/sbin", "usr/bin"] {
        layer.directory(dir, if dir == "tmp" { 0o1777 } else { 0o755 })?;
    }
    layer.file("bin/busybox", 0o755, &busybox)?;
    layer.file("bin/tool", 0o755, &tool)?;
    layer.file("sbin/ip", 0o755, &ip)?;
    for applet in [
        "sh", "ash", "ls", "cat", "echo", "sleep", "ping", "ping6", "nc", "wget", "nslookup", "grep", "head",
        "tail", "sed", "awk", "true", "false", "test", "[", "ps", "kill", "mkdir", "rm", "cp", "mv", "touch",
        "hostname", "date", "id", "env", "seq", "sort", "uniq", "wc", "cut", "tr", "xargs", "find", "arping",
        "ifconfig", "netstat", "timeout", "stat", "dd", "chmod", "ln", "printf",
    ] {
        layer.symlink(&format!("bin/{applet}"), "busybox")?;
    }
    for library in libraries(Path::new("/usr/sbin/ip"))? {
        let content = fs::read(&library).with_context(|| format!("read {library}"))?;
        let mut dir = String::new();
        let path = library.trim_start_matches('/');
        for part in path.split('/').take(path.split('/').count() - 1) {
            dir = format!("{dir}{part}/");
            layer.directory(&dir, 0o755)?;
        }
        layer.file(path, 0o755, &content)?;
    }
    Ok(layer)
}

/// Packs an image with this layer into the cache.
fn build_image(reference: &str, name: &str, layer: TarBuilder) -> Result<PathBuf> {
    let image = Image {
        reference,
        layer: layer.finish(),
        entrypoint: &["/bin/tool", "pause"],
        environment: &["PATH=/sbin:/bin:/usr/sbin:/usr/bin"],
        user: "",
        labels: BTreeMap::new(),
    };
    let packed = image.pack()?;
    let dir = paths::cache_dir()?.join("images");
    let path = dir.join(format!("{name}-{}.tar", &sha256_hex(&packed)[..16]));
    if !path.exists() {
        fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
        let partial = path.with_extension("partial");
        fs::write(&partial, packed).context("write the image")?;
        fs::rename(&partial, &path).context("rename the image")?;
    }
    Ok(path)
}

/// The paths of a program's shared libraries, from `ldd`.
fn libraries(program: &Path) -> Result<Vec<String>> {
    let text = capture(Command::new("ldd").arg(program))?;
    let found = text.lines().filter_map(|line| {
        let path = line.split("=>").last()?.split_whitespace().next()?;
        path.starts_with('/').then(|| path.to_owned())
    });
    Ok(found.collect())
}
