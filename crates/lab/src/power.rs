//! What happens to a lab while it runs: reboots, nodes that come and go, cut cables, dead programs, new images.

use std::{fs, path::Path, process::Stdio, time::Duration};

use anyhow::{Context as _, Result, bail};
use k8s_openapi::api::core::v1::Node as KubeNode;
use kube::{Api, api::DeleteParams};
use nix::sys::signal::Signal;

use crate::{
    control_plane,
    digest::sha256_hex,
    init::Component,
    lab::{Lab, NodeRecord, Record, require_root},
    machine::Machine,
    node, place,
    program::Programs,
    switch::{self, Cable},
    wait,
};

/// A program of the lab: `kube-apiserver`, or with its node `node-1/kubelet`.
#[derive(Clone, Debug)]
pub struct Target {
    pub machine: Machine,
    pub component: Component,
}

impl Lab {
    fn node_record(&self, name: &str) -> Result<NodeRecord> {
        let record = self.record()?;
        let known = || record.nodes.iter().map(|n| n.name.as_str()).collect::<Vec<_>>().join(", ");
        let found = record.nodes.iter().find(|n| n.name == name).cloned();
        found.with_context(|| format!("lab {} has no node {name}; it has {}", self.name, known()))
    }

    /// Power-cycles a node: everything in it dies, links and `/run` are gone, the disk stays.
    pub async fn reboot(&self, name: &str) -> Result<()> {
        require_root()?;
        let _lock = self.lock()?;
        let node = self.node_record(name)?;
        self.node(name).kill()?;
        let only = Record { nodes: vec![node] };
        self.start_only(&only).await
    }

    /// Adds a node with the next free number; answers its name.
    pub async fn add_node(&self) -> Result<String> {
        require_root()?;
        let _lock = self.lock()?;
        let mut record = self.record()?;
        let programs = Programs::prepare()?;
        self.keep_image(&crate::image::lab_image(&programs)?, "lab")?;
        let node = record.add()?;
        self.save(&record)?;
        self.start_only(&Record { nodes: vec![node.clone()] }).await?;
        Ok(node.name)
    }

    async fn start_only(&self, only: &Record) -> Result<()> {
        self.start_nodes(only, &Programs::prepare()?)?;
        let all = self.record()?;
        // Routes in both directions: the others know the way already, unless it is a new node.
        for machine in &all.nodes {
            let others: Vec<_> =
                all.nodes.iter().filter(|n| n.number != machine.number).map(NodeRecord::address).collect();
            if self.node(&machine.name).init().is_some() {
                switch::route(&self.node(&machine.name), &others)?;
            }
        }
        self.finish(only).await
    }

    /// Takes a node out: machine, disk, and its Node object.
    pub async fn remove_node(&self, name: &str) -> Result<()> {
        require_root()?;
        let _lock = self.lock()?;
        let node = self.node_record(name)?;
        self.node(name).kill()?;
        let mut record = self.record()?;
        for other in record.nodes.iter().filter(|other| other.name != name) {
            switch::unroute(&self.node(&other.name), node.address());
        }
        switch::unroute(&self.control_plane(), node.address());
        place::remove(&self.dir.join("machines").join(name))?;
        let nodes: Api<KubeNode> = Api::all(self.client().await?);
        match nodes.delete(name, &DeleteParams::default()).await {
            Err(kube::Error::Api(e)) if e.is_not_found() => {}
            other => other.map(|_| ()).with_context(|| format!("delete Node {name}"))?,
        }
        // Last: as long as it is listed, the command can be repeated.
        record.nodes.retain(|n| n.name != name);
        self.save(&record)
    }

    /// Cuts a node off from everything.
    pub fn partition(&self, name: &str) -> Result<()> {
        self.set_cable(name, Cable::Cut)
    }

    /// Lets it back.
    pub fn heal(&self, name: &str) -> Result<()> {
        self.set_cable(name, Cable::Whole)
    }

    fn set_cable(&self, name: &str, cable: Cable) -> Result<()> {
        require_root()?;
        let _lock = self.lock()?;
        let node = self.node_record(name)?;
        let mut record = self.record()?;
        for node in record.nodes.iter_mut().filter(|n| n.name == name) {
            node.cut = cable == Cable::Cut;
        }
        self.save(&record)?;
        switch::set(&self.control_plane(), node.address(), cable)
    }

    /// Finds a component by what people call it: `etcd`, `apiserver`, `node-1/kubelet`.
    pub fn target(&self, text: &str) -> Result<Target> {
        let (machine, name) = text.split_once('/').unwrap_or((control_plane::NAME, text));
        let components: Vec<Component> = if machine == control_plane::NAME {
            control_plane::foundation().into_iter().chain(control_plane::controllers()).collect()
        } else {
            node::components(&self.node(machine), self.node_record(machine)?.address()).into()
        };
        let known: Vec<String> = components.iter().map(|c| c.name.clone()).collect();
        let matches = |c: &Component| c.name == name || c.name.strip_prefix("kube-") == Some(name);
        let component = components.into_iter().find(matches).with_context(|| {
            format!(
                "{machine} has no component {name}; it has {}; those of a node are written NODE/NAME",
                known.join(", ")
            )
        })?;
        Ok(Target { machine: self.node(machine), component })
    }

    /// Ends a component and starts it anew.
    pub fn restart(&self, component: &str) -> Result<()> {
        let target = self.target(component)?;
        target.machine.stop(&target.component.name)?;
        target.machine.run(&target.component)
    }

    /// Kills a component with SIGKILL; it stays dead until `restart` or `up`.
    pub fn kill(&self, component: &str) -> Result<()> {
        let Target { machine, component } = self.target(component)?;
        machine.signal(&component.name, Signal::SIGKILL)?;
        let what = format!("{} to die", component.name);
        wait::blocking(Duration::from_secs(5), &what, || {
            let alive = matches!(
                machine.components()?.get(&component.name),
                Some(crate::init::State::Running { .. })
            );
            Ok((!alive).then_some(()))
        })
    }

    /// Stops a component where it stands.
    pub fn pause(&self, component: &str) -> Result<()> {
        let Target { machine, component } = self.target(component)?;
        machine.signal(&component.name, Signal::SIGSTOP)
    }

    /// Lets a paused component go on.
    pub fn resume(&self, component: &str) -> Result<()> {
        let Target { machine, component } = self.target(component)?;
        machine.signal(&component.name, Signal::SIGCONT)
    }

    /// Gives an image to all nodes, and to those that come later.
    pub fn load_image(&self, tar: &Path) -> Result<()> {
        require_root()?;
        let _lock = self.lock()?;
        let stem = tar.file_stem().and_then(|s| s.to_str()).context("an image tar has a name")?;
        // Never in the place of the lab's own.
        self.keep_image(tar, &format!("user-{stem}"))?;
        for node in self.nodes() {
            self.import_images(&self.node(&node))?;
        }
        Ok(())
    }

    pub(crate) fn keep_image(&self, tar: &Path, name: &str) -> Result<()> {
        let dir = self.dir.join("images");
        fs::create_dir_all(&dir).with_context(|| format!("make {}", dir.display()))?;
        let kept = dir.join(format!("{name}.tar"));
        let partial = dir.join(format!("{name}.partial"));
        fs::copy(tar, &partial).with_context(|| format!("copy {}", tar.display()))?;
        fs::rename(&partial, &kept).with_context(|| format!("keep {}", kept.display()))
    }

    /// Imports every kept image that the node does not have yet.
    pub(crate) fn import_images(&self, machine: &Machine) -> Result<()> {
        wait::blocking(Duration::from_secs(30), &format!("containerd on {}", machine.name), || {
            machine.output(&["ctr", "version"]).map(Some)
        })?;
        let done = machine.disk().join("var/lib/lab-images");
        fs::create_dir_all(&done).context("make the list of images")?;
        let mut images: Vec<_> = fs::read_dir(self.dir.join("images"))?.flatten().map(|e| e.path()).collect();
        images.sort();
        for image in images.iter().filter(|path| path.extension().is_some_and(|e| e == "tar")) {
            let content = fs::read(image).with_context(|| format!("read {}", image.display()))?;
            let digest = sha256_hex(&content);
            let mark = done.join(image.file_name().context("an image has a name")?);
            if fs::read_to_string(&mark).is_ok_and(|imported| imported == digest) {
                continue;
            }
            let output = machine
                .command("ctr")?
                .args(["-n", "k8s.io", "images", "import", "--local", "-"])
                .stdin(Stdio::from(fs::File::open(image)?))
                .output()
                .context("run ctr")?;
            if !output.status.success() {
                let said = String::from_utf8_lossy(&output.stderr);
                bail!("import {} on {}: {}", image.display(), machine.name, said.trim());
            }
            fs::write(&mark, digest).context("note the image")?;
        }
        Ok(())
    }
}
