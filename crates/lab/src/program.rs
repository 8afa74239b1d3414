//! The third-party programs of the lab: pinned Go modules, built once and cached by the hash of their lock files.

use std::{
    fs::{self, File},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Instant,
};

use anyhow::{Context as _, Result, bail};
use nix::fcntl::{Flock, FlockArg};

use crate::{digest::sha256_hex, paths, progress::print_progress};

/// A Go module of ours that pins one group of programs.
struct GoModule {
    name: &'static str,
    /// What is written into the build directory, and what the cache key is made of.
    files: &'static [(&'static str, &'static str)],
    ldflags: &'static str,
    /// Package path and the program's file name.
    programs: &'static [(&'static str, &'static str)],
}

macro_rules! lock {
    ($dir:literal $(, $more:literal)*) => {
        &[
            ("go.mod", include_str!(concat!("../third-party/", $dir, "/go.mod"))),
            ("go.sum", include_str!(concat!("../third-party/", $dir, "/go.sum"))),
            $(($more, include_str!(concat!("../third-party/", $dir, "/", $more))),)*
        ]
    };
}

/// The version that `kubectl version` and the kubelets report; the module proxy's copy carries no version of its own.
const KUBERNETES: &str = "-s -w \
    -X k8s.io/component-base/version.gitVersion=v1.36.3 \
    -X k8s.io/component-base/version.gitMajor=1 \
    -X k8s.io/component-base/version.gitMinor=36 \
    -X k8s.io/component-base/version.gitTreeState=clean \
    -X k8s.io/component-base/version.gitCommit=v1.36.3 \
    -X k8s.io/component-base/version.buildDate=1970-01-01T00:00:00Z";
const PLAIN: &str = "-s -w";

const MODULES: &[GoModule] = &[
    GoModule {
        name: "etcd",
        files: lock!("etcd"),
        ldflags: PLAIN,
        programs: &[("go.etcd.io/etcd/server/v3", "etcd")],
    },
    GoModule {
        name: "kubernetes",
        files: lock!("kubernetes"),
        ldflags: KUBERNETES,
        programs: &[
            ("k8s.io/kubernetes/cmd/kube-apiserver", "kube-apiserver"),
            ("k8s.io/kubernetes/cmd/kube-controller-manager", "kube-controller-manager"),
            ("k8s.io/kubernetes/cmd/kube-scheduler", "kube-scheduler"),
            ("k8s.io/kubernetes/cmd/kubelet", "kubelet"),
            ("k8s.io/kubernetes/cmd/kube-proxy", "kube-proxy"),
            ("k8s.io/kubernetes/cmd/kubectl", "kubectl"),
        ],
    },
    GoModule {
        name: "containerd",
        files: lock!("containerd"),
        ldflags: PLAIN,
        programs: &[
            ("github.com/containerd/containerd/v2/cmd/containerd", "containerd"),
            ("github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2", "containerd-shim-runc-v2"),
            ("github.com/containerd/containerd/v2/cmd/ctr", "ctr"),
        ],
    },
    GoModule {
        name: "coredns",
        files: lock!("coredns", "main.go"),
        ldflags: PLAIN,
        programs: &[(".", "coredns")],
    },
    GoModule {
        name: "multus",
        files: lock!("multus"),
        ldflags: PLAIN,
        programs: &[
            ("gopkg.in/k8snetworkplumbingwg/multus-cni.v4/cmd/multus-daemon", "multus-daemon"),
            ("gopkg.in/k8snetworkplumbingwg/multus-cni.v4/cmd/multus-shim", "multus-shim"),
        ],
    },
    GoModule {
        name: "cni-plugins",
        files: lock!("cni-plugins"),
        ldflags: PLAIN,
        programs: &[
            ("github.com/containernetworking/plugins/plugins/main/bridge", "bridge"),
            ("github.com/containernetworking/plugins/plugins/main/host-device", "host-device"),
            ("github.com/containernetworking/plugins/plugins/main/loopback", "loopback"),
            ("github.com/containernetworking/plugins/plugins/main/macvlan", "macvlan"),
            ("github.com/containernetworking/plugins/plugins/main/ptp", "ptp"),
            ("github.com/containernetworking/plugins/plugins/ipam/host-local", "host-local"),
            ("github.com/containernetworking/plugins/plugins/ipam/static", "static"),
            ("github.com/containernetworking/plugins/plugins/meta/portmap", "portmap"),
            ("github.com/containernetworking/plugins/plugins/meta/tuning", "tuning"),
        ],
    },
];

/// The tool that runs inside test pods; plain std Rust, linked statically.
const TOOL: &str = include_str!("../third-party/tool/tool.rs");

/// The CNI plugins that a node has in `/opt/cni/bin`.
pub const CNI_PLUGINS: &[&str] = &[
    "bridge",
    "host-device",
    "loopback",
    "macvlan",
    "ptp",
    "host-local",
    "static",
    "portmap",
    "tuning",
    "multus-shim",
];

/// All programs, ready to run.
#[derive(Clone, Debug)]
pub struct Programs {
    root: PathBuf,
}

impl GoModule {
    fn key(&self) -> String {
        let mut text = String::from(self.ldflags);
        for (name, content) in self.files {
            text.push_str(name);
            text.push_str(content);
        }
        format!("{}-{}", self.name, &sha256_hex(text.as_bytes())[..16])
    }
}

fn tool_key() -> String {
    format!("tool-{}", &sha256_hex(TOOL.as_bytes())[..16])
}

impl Programs {
    /// Builds what is not cached yet. Says what it does; silent when there is nothing to do.
    pub fn prepare() -> Result<Self> {
        let root = paths::cache_dir()?.join("third-party");
        let programs = Self { root };
        if programs.complete() {
            return Ok(programs);
        }
        fs::create_dir_all(&programs.root).with_context(|| format!("make {}", programs.root.display()))?;
        let lock = File::create(programs.root.join(".lock")).context("make the cache's lock file")?;
        let _held = Flock::lock(lock, FlockArg::LockExclusive)
            .map_err(|(_, e)| e)
            .context("lock the cache of programs")?;
        let total: usize = MODULES.iter().map(|m| m.programs.len()).sum::<usize>() + 1;
        let mut done = 0;
        for module in MODULES {
            programs.build(module, &mut done, total)?;
        }
        programs.build_tool(done + 1, total)?;
        Ok(programs)
    }

    /// The directory that holds all cached programs.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Path of a program relative to [`Programs::root`].
    pub fn relative(&self, program: &str) -> Result<String> {
        if program == "tool" {
            return Ok(format!("{}/tool", tool_key()));
        }
        let module = MODULES.iter().find(|m| m.programs.iter().any(|(_, name)| *name == program));
        let module = module.with_context(|| format!("no module builds the program {program}"))?;
        Ok(format!("{}/{program}", module.key()))
    }

    /// Path of a program on this machine.
    pub fn path(&self, program: &str) -> Result<PathBuf> {
        Ok(self.root.join(self.relative(program)?))
    }

    /// The names of all programs.
    pub fn names() -> impl Iterator<Item = &'static str> {
        MODULES.iter().flat_map(|m| m.programs.iter().map(|(_, name)| *name)).chain(["tool"])
    }

    fn complete(&self) -> bool {
        Self::names().all(|name| self.path(name).is_ok_and(|p| p.exists()))
    }

    fn build(&self, module: &GoModule, done: &mut usize, total: usize) -> Result<()> {
        let dir = self.root.join(module.key());
        fs::create_dir_all(&dir).with_context(|| format!("make {}", dir.display()))?;
        for (name, content) in module.files {
            fs::write(dir.join(name), content).with_context(|| format!("write {name} of {}", module.name))?;
        }
        for (package, program) in module.programs {
            *done += 1;
            if dir.join(program).exists() {
                continue;
            }
            print_progress(format!("[{done}/{total}] building {program} ({}) …", module.name));
            let start = Instant::now();
            let partial = dir.join(format!(".{program}.partial"));
            let status = Command::new("go")
                .args([
                    "build",
                    "-mod=readonly",
                    "-trimpath",
                    "-buildvcs=false",
                    "-ldflags",
                    module.ldflags,
                    "-o",
                ])
                .arg(&partial)
                .arg(package)
                .current_dir(&dir)
                .env("CGO_ENABLED", "0")
                .env("GOTOOLCHAIN", "local")
                .env("GOFLAGS", "")
                .env("GOWORK", "off")
                .stdin(Stdio::null())
                .status()
                .context("run go: install Go 1.26 or later")?;
            if !status.success() {
                bail!("building {program} from {} failed: {status}", dir.display());
            }
            fs::rename(&partial, dir.join(program)).with_context(|| format!("put {program} in place"))?;
            print_progress(format!(
                "[{done}/{total}] built {program} in {:.0} s",
                start.elapsed().as_secs_f64()
            ));
        }
        Ok(())
    }

    fn build_tool(&self, done: usize, total: usize) -> Result<()> {
        let dir = self.root.join(tool_key());
        if dir.join("tool").exists() {
            return Ok(());
        }
        print_progress(format!("[{done}/{total}] building tool (for test pods) …"));
        fs::create_dir_all(&dir).with_context(|| format!("make {}", dir.display()))?;
        let source = dir.join("tool.rs");
        fs::write(&source, TOOL).context("write tool.rs")?;
        let partial = dir.join(".tool.partial");
        let status = Command::new("rustc")
            .args(["--edition", "2024", "-O", "-C", "panic=abort", "-C", "strip=symbols"])
            .args(["-C", "target-feature=+crt-static", "-o"])
            .arg(&partial)
            .arg(&source)
            .status()
            .context("run rustc: install Rust")?;
        if !status.success() {
            bail!("building tool from {} failed: {status}", source.display());
        }
        fs::set_permissions(&partial, fs::Permissions::from_mode(0o755)).context("mark tool executable")?;
        fs::rename(&partial, dir.join("tool")).context("put tool in place")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_key_follows_the_lock_files() {
        let keys: Vec<String> = MODULES.iter().map(GoModule::key).collect();
        let mut unique = keys.clone();
        unique.sort();
        unique.dedup();
        assert_eq!(unique.len(), keys.len());
        let changed = GoModule {
            ldflags: "-w",
            ..GoModule { name: "etcd", files: lock!("etcd"), ldflags: PLAIN, programs: &[] }
        };
        assert_ne!(changed.key(), MODULES[0].key());
    }

    #[test]
    fn every_node_plugin_is_a_known_program() {
        for plugin in CNI_PLUGINS {
            assert!(Programs::names().any(|n| n == *plugin), "{plugin}");
        }
    }
}
