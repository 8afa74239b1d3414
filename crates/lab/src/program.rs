//! The third-party programs of the lab: built once from pinned Go modules, cached by the hash of their lock files.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::mpsc,
    thread,
    time::Instant,
};

use anyhow::{Context as _, Result, bail};
use nix::fcntl::{Flock, FlockArg};

use crate::{
    digest::sha256_hex,
    machine::capture,
    native_program::{RustProgram, build_c_program},
    paths,
    progress::print_progress,
};

/// A Go module that pins the versions of one group of programs.
///
/// The groups need different versions of the same libraries, so each has its own module. All are compiled with the same
/// flags: the Go build cache then shares the standard library and every dependency whose version is equal.
struct GoModule {
    name: &'static str,
    /// The files of the build directory: name and content. Part of the cache key.
    files: &'static [(&'static str, &'static str)],
    ldflags: &'static str,
    /// Build tags, separated by commas.
    tags: &'static str,
    /// Package path and file name of each program.
    programs: &'static [(&'static str, &'static str)],
}

macro_rules! lock_files {
    ($dir:literal $(, $more:literal)*) => {
        &[
            ("go.mod", include_str!(concat!("../third-party/", $dir, "/go.mod"))),
            ("go.sum", include_str!(concat!("../third-party/", $dir, "/go.sum"))),
            $(($more, include_str!(concat!("../third-party/", $dir, "/", $more))),)*
        ]
    };
}

/// The compiler generates no debug information, since `-s -w` drops it at link time: this saves 15 % of the compile time.
/// Not part of the cache key, because the programs are the same.
const GCFLAGS: &str = "-gcflags=all=-dwarf=false";
/// Parallel downloads of `go list`, which uses GOMAXPROCS as its limit.
const PARALLEL_DOWNLOADS: &str = "8";

const LDFLAGS: &str = "-s -w";
/// Sets the version that `kubectl version` and the kubelets report; the source from the module proxy does not contain it.
const KUBERNETES_LDFLAGS: &str = "-s -w \
    -X k8s.io/component-base/version.gitVersion=v1.36.3 \
    -X k8s.io/component-base/version.gitMajor=1 \
    -X k8s.io/component-base/version.gitMinor=36 \
    -X k8s.io/component-base/version.gitTreeState=clean \
    -X k8s.io/component-base/version.gitCommit=v1.36.3 \
    -X k8s.io/component-base/version.buildDate=1970-01-01T00:00:00Z";

/// Sets the version that virt-controller logs.
const KUBEVIRT_LDFLAGS: &str = "-s -w \
    -X kubevirt.io/client-go/version.gitVersion=v1.7.0 \
    -X kubevirt.io/client-go/version.gitTreeState=clean \
    -X kubevirt.io/client-go/version.gitCommit=v1.7.0";

/// In build order. The smallest comes first, so that compiling starts while the others are downloaded.
const MODULES: &[GoModule] = &[
    GoModule {
        name: "cni-plugins",
        files: lock_files!("cni-plugins"),
        ldflags: LDFLAGS,
        tags: "",
        programs: &[
            ("github.com/containernetworking/plugins/plugins/main/bridge", "bridge"),
            ("github.com/containernetworking/plugins/plugins/main/host-device", "host-device"),
            ("github.com/containernetworking/plugins/plugins/main/loopback", "loopback"),
            ("github.com/containernetworking/plugins/plugins/main/macvlan", "macvlan"),
            ("github.com/containernetworking/plugins/plugins/main/ptp", "ptp"),
            ("github.com/containernetworking/plugins/plugins/ipam/host-local", "host-local"),
            ("github.com/containernetworking/plugins/plugins/ipam/static", "static"),
            ("github.com/containernetworking/plugins/plugins/meta/bandwidth", "bandwidth"),
            ("github.com/containernetworking/plugins/plugins/meta/portmap", "portmap"),
            ("github.com/containernetworking/plugins/plugins/meta/tuning", "tuning"),
        ],
    },
    GoModule {
        name: "etcd",
        files: lock_files!("etcd"),
        ldflags: LDFLAGS,
        tags: "",
        programs: &[("go.etcd.io/etcd/server/v3", "etcd")],
    },
    GoModule {
        name: "containerd",
        files: lock_files!("containerd"),
        ldflags: LDFLAGS,
        tags: "",
        programs: &[
            ("github.com/containerd/containerd/v2/cmd/containerd", "containerd"),
            ("github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2", "containerd-shim-runc-v2"),
            ("github.com/containerd/containerd/v2/cmd/ctr", "ctr"),
        ],
    },
    GoModule {
        name: "kubernetes",
        files: lock_files!("kubernetes"),
        ldflags: KUBERNETES_LDFLAGS,
        tags: "",
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
        name: "coredns",
        files: lock_files!("coredns", "main.go"),
        ldflags: LDFLAGS,
        tags: "",
        programs: &[(".", "coredns")],
    },
    GoModule {
        name: "multus",
        files: lock_files!("multus"),
        ldflags: LDFLAGS,
        tags: "",
        programs: &[
            ("gopkg.in/k8snetworkplumbingwg/multus-cni.v4/cmd/multus", "multus"),
            ("gopkg.in/k8snetworkplumbingwg/multus-cni.v4/cmd/multus-daemon", "multus-daemon"),
            ("gopkg.in/k8snetworkplumbingwg/multus-cni.v4/cmd/multus-shim", "multus-shim"),
        ],
    },
    GoModule {
        name: "crio",
        files: lock_files!("crio"),
        ldflags: LDFLAGS,
        tags: "containers_image_openpgp,exclude_graphdriver_btrfs,exclude_graphdriver_devicemapper,exclude_graphdriver_zfs",
        programs: &[("github.com/cri-o/cri-o/cmd/crio", "crio")],
    },
];

/// Only labs with KubeVirt need it.
const KUBEVIRT: GoModule = GoModule {
    name: "kubevirt",
    files: lock_files!("kubevirt"),
    ldflags: KUBEVIRT_LDFLAGS,
    tags: "",
    programs: &[("kubevirt.io/kubevirt/cmd/virt-controller", VIRT_CONTROLLER)],
};

/// KubeVirt's controller.
pub const VIRT_CONTROLLER: &str = "virt-controller";
/// What stands in for the programs of KubeVirt's launcher image.
pub const LAUNCHER: &str = "launcher";

/// The helper of CRI-O that creates namespaces: C source in CRI-O's Go module.
const PINNS: &str = "pinns";

const RUST_PROGRAMS: &[RustProgram] = &[
    // The program of test pods.
    RustProgram { name: "tool", source: include_str!("../third-party/tool/tool.rs") },
    // A CNI plugin that records its calls.
    RustProgram { name: "lab-record", source: include_str!("../third-party/record/record.rs") },
    RustProgram { name: LAUNCHER, source: include_str!("../third-party/launcher/launcher.rs") },
];

/// Which programs to build.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgramSet {
    /// What every lab needs.
    Base,
    /// Also KubeVirt's controller, which takes minutes to build.
    WithKubeVirt,
}

impl ProgramSet {
    fn modules(self) -> impl Iterator<Item = &'static GoModule> {
        MODULES.iter().chain((self == Self::WithKubeVirt).then_some(&KUBEVIRT))
    }

    /// The names of the programs.
    fn names(self) -> impl Iterator<Item = &'static str> {
        self.modules().flat_map(GoModule::names).chain([PINNS]).chain(RUST_PROGRAMS.iter().map(|p| p.name))
    }
}

/// The CNI plugins in `/opt/cni/bin` of every node.
pub const CNI_PLUGINS: &[&str] = &[
    "bridge",
    "host-device",
    "loopback",
    "macvlan",
    "ptp",
    "host-local",
    "static",
    "bandwidth",
    "portmap",
    "tuning",
    "lab-record",
];

/// The programs of multus that are CNI plugins: the thin one and the client of the daemon.
pub const MULTUS_PLUGINS: &[&str] = &["multus", "multus-shim"];

/// The cache of built programs.
#[derive(Clone, Debug)]
pub struct Programs {
    root: PathBuf,
}

impl GoModule {
    fn key(&self) -> String {
        let mut text = format!("{}{}", self.ldflags, self.tags);
        for (name, content) in self.files {
            text.push_str(name);
            text.push_str(content);
        }
        format!("{}-{}", self.name, &sha256_hex(text.as_bytes())[..16])
    }

    fn names(&self) -> impl Iterator<Item = &'static str> {
        self.programs.iter().map(|(_, name)| *name)
    }

    /// Downloads exactly the modules that the programs need.
    fn download(&self, dir: &Path) -> Result<()> {
        let packages = self.programs.iter().map(|(package, _)| package);
        let mut list = go(dir, "list");
        list.args(["-deps", "-tags", self.tags]).args(packages).env("GOMAXPROCS", PARALLEL_DOWNLOADS);
        capture(&mut list)
            .map(|_| ())
            .with_context(|| format!("download the Go modules of {} with Go 1.26.8 or later", self.name))
    }

    /// Builds all programs with one `go build`, so that the links of some overlap with the compilation of others.
    fn build(&self, dir: &Path) -> Result<()> {
        let partial = dir.join(".partial");
        fs::create_dir_all(&partial).with_context(|| format!("create {}", partial.display()))?;
        // With a directory as its output, Go names each program after its package.
        let output = match self.programs {
            [(_, name)] => partial.join(name),
            _ => partial.clone(),
        };
        let status = go(dir, "build")
            .args(["-trimpath", "-buildvcs=false", GCFLAGS, "-tags", self.tags])
            .args(["-ldflags", self.ldflags, "-o"])
            .arg(output)
            .args(self.programs.iter().map(|(package, _)| package))
            .status()
            .context("run go; install Go 1.26.8 or later")?;
        if !status.success() {
            bail!("build {} in {}: {status}", self.name, dir.display());
        }
        for name in self.names() {
            fs::rename(partial.join(name), dir.join(name)).with_context(|| format!("rename {name}"))?;
        }
        fs::remove_dir_all(&partial).with_context(|| format!("remove {}", partial.display()))
    }
}

/// A Go command in a module's directory. All commands have the same settings, so that they share the build cache.
fn go(dir: &Path, subcommand: &str) -> Command {
    let mut command = Command::new("go");
    command
        .args([subcommand, "-mod=readonly"])
        .current_dir(dir)
        .env("CGO_ENABLED", "0")
        .env("GOTOOLCHAIN", "local")
        .env("GOFLAGS", "")
        .env("GOWORK", "off")
        .stdin(Stdio::null());
    command
}

fn crio() -> Result<&'static GoModule> {
    MODULES.iter().find(|module| module.name == "crio").context("no Go module builds crio")
}

/// The path of virt-controller relative to [`Programs::root`].
pub fn virt_controller_path() -> String {
    format!("{}/{VIRT_CONTROLLER}", KUBEVIRT.key())
}

impl Programs {
    /// Builds the programs of every lab that are not cached. Prints its progress; silent when all are cached.
    pub fn prepare() -> Result<Self> {
        Self::prepare_set(ProgramSet::Base)
    }

    /// The same as [`Programs::prepare`] for these programs.
    pub fn prepare_set(set: ProgramSet) -> Result<Self> {
        let root = paths::cache_dir()?.join("third-party");
        let programs = Self { root };
        if programs.complete(set) {
            return Ok(programs);
        }
        fs::create_dir_all(&programs.root).with_context(|| format!("create {}", programs.root.display()))?;
        let lock = File::create(programs.root.join(".lock")).context("create the cache's lock file")?;
        let _lock = Flock::lock(lock, FlockArg::LockExclusive)
            .map_err(|(_, e)| e)
            .context("lock the cache of programs")?;
        programs.build_modules(set)?;
        programs.build_pinns()?;
        RUST_PROGRAMS.iter().try_for_each(|program| program.build(&programs.root))?;
        Ok(programs)
    }

    /// The directory of all cached programs.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The path of a program relative to [`Programs::root`].
    pub fn relative(&self, program: &str) -> Result<String> {
        if let Some(found) = RUST_PROGRAMS.iter().find(|p| p.name == program) {
            return Ok(format!("{}/{program}", found.key()));
        }
        if program == PINNS {
            return Ok(format!("{}/{PINNS}", crio()?.key()));
        }
        let mut modules = ProgramSet::WithKubeVirt.modules();
        let module = modules.find(|m| m.names().any(|name| name == program));
        let module = module.with_context(|| format!("{program} is not a program of the lab"))?;
        Ok(format!("{}/{program}", module.key()))
    }

    /// The path of a program on the host.
    pub fn path(&self, program: &str) -> Result<PathBuf> {
        Ok(self.root.join(self.relative(program)?))
    }

    /// The names of the programs of every lab.
    pub fn names() -> impl Iterator<Item = &'static str> {
        ProgramSet::Base.names()
    }

    fn complete(&self, set: ProgramSet) -> bool {
        set.names().all(|name| self.path(name).is_ok_and(|p| p.exists()))
    }

    fn build_pinns(&self) -> Result<()> {
        let program = self.path(PINNS)?;
        if program.exists() {
            return Ok(());
        }
        let mut list = go(&self.root.join(crio()?.key()), "list");
        let source = capture(list.args(["-m", "-f", "{{.Dir}}", "github.com/cri-o/cri-o"]))?;
        build_c_program(PINNS, &Path::new(source.trim()).join("pinns/src"), &program)
    }

    /// Builds the modules one after another, and downloads the next ones meanwhile.
    fn build_modules(&self, set: ProgramSet) -> Result<()> {
        let missing: Vec<(&GoModule, PathBuf)> = set
            .modules()
            .map(|module| (module, self.root.join(module.key())))
            .filter(|(module, dir)| !module.names().all(|name| dir.join(name).exists()))
            .collect();
        for (module, dir) in &missing {
            fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
            for (name, content) in module.files {
                fs::write(dir.join(name), content)
                    .with_context(|| format!("write {name} of {}", module.name))?;
            }
        }
        thread::scope(|scope| {
            let (sender, downloads) = mpsc::channel();
            let missing = &missing;
            scope.spawn(move || {
                for (module, dir) in missing {
                    // The receiver is dropped after a failed build.
                    if sender.send(module.download(dir)).is_err() {
                        return;
                    }
                }
            });
            for (index, (module, dir)) in missing.iter().enumerate() {
                let names: Vec<&str> = module.names().collect();
                let step = format!("[{}/{}]", index + 1, missing.len());
                print_progress(format!("{step} {}: building {} …", module.name, names.join(", ")));
                let start = Instant::now();
                downloads.recv().context("the download thread stopped")??;
                let downloaded = start.elapsed().as_secs_f64();
                module.build(dir)?;
                let elapsed = start.elapsed().as_secs_f64();
                print_progress(format!(
                    "{step} {}: built in {elapsed:.0} s, of which {downloaded:.0} s waiting for downloads",
                    module.name
                ));
            }
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_key_depends_on_lock_files_and_flags() {
        let keys: Vec<String> = ProgramSet::WithKubeVirt.modules().map(GoModule::key).collect();
        let mut unique = keys.clone();
        unique.sort();
        unique.dedup();
        assert_eq!(unique.len(), keys.len());
        let changed = GoModule {
            ldflags: "-w",
            ..GoModule { name: "etcd", files: lock_files!("etcd"), ldflags: LDFLAGS, tags: "", programs: &[] }
        };
        let etcd = MODULES.iter().find(|module| module.name == "etcd").unwrap();
        assert_ne!(changed.key(), etcd.key());
    }

    #[test]
    fn only_labs_with_kubevirt_build_its_controller() {
        assert!(!Programs::names().any(|name| name == VIRT_CONTROLLER));
        assert!(ProgramSet::WithKubeVirt.names().any(|name| name == VIRT_CONTROLLER));
    }

    #[test]
    fn every_cni_plugin_is_a_known_program() {
        for plugin in CNI_PLUGINS.iter().chain(MULTUS_PLUGINS) {
            assert!(Programs::names().any(|n| n == *plugin), "{plugin}");
        }
    }

    #[test]
    fn programs_of_a_common_build_are_named_after_their_packages() {
        for module in MODULES.iter().filter(|module| module.programs.len() > 1) {
            for (package, name) in module.programs {
                assert_eq!(package.rsplit('/').next(), Some(*name));
            }
        }
    }
}
