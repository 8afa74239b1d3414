//! Operations on a running lab: reboot, add, remove and partition nodes; restart, kill and pause components; load images.

use std::{fs, path::Path, time::Duration};

use anyhow::{Context as _, Result};
use k8s_openapi::api::core::v1::Node as KubeNode;
use kube::{Api, api::DeleteParams};
use nix::sys::signal::Signal;

use crate::{
    control_plane,
    digest::sha256_hex,
    init::Component,
    lab::{Lab, require_root},
    lab_record::{LabRecord, NodeRecord},
    machine::Machine,
    node,
    node_options::{NodeOptions, Runtime},
    paths,
    switch::{self, CableState},
    wait,
};

/// A component and the machine it runs on.
#[derive(Clone, Debug)]
pub struct ComponentRef {
    pub machine: Machine,
    pub component: Component,
}

impl Lab {
    fn node_record(&self, name: &str) -> Result<NodeRecord> {
        let record = self.record()?;
        let names = || record.nodes.iter().map(|n| n.name.as_str()).collect::<Vec<_>>().join(", ");
        let found = record.nodes.iter().find(|n| n.name == name).cloned();
        found.with_context(|| format!("lab {} has no node {name}; it has {}", self.name, names()))
    }

    /// Power-cycles a node: kills all its processes, loses links and `/run`, keeps the disk.
    pub async fn reboot(&self, name: &str) -> Result<()> {
        require_root()?;
        let _lock = self.lock()?;
        let node = self.node_record(name)?;
        self.node(name).power_off()?;
        self.start_some_nodes(vec![node]).await
    }

    /// Adds a node with the lowest free number and returns its name.
    pub async fn add_node(&self) -> Result<String> {
        self.add_node_with(NodeOptions::default()).await
    }

    /// Adds a node that runs other programs than the default ones.
    pub async fn add_node_with(&self, options: NodeOptions) -> Result<String> {
        require_root()?;
        let _lock = self.lock()?;
        let mut record = self.record()?;
        let node = record.add(|_| options)?;
        self.store_images(&record, &record.programs()?)?;
        self.save(&record)?;
        self.start_some_nodes(vec![node.clone()]).await?;
        Ok(node.name)
    }

    async fn start_some_nodes(&self, nodes: Vec<NodeRecord>) -> Result<()> {
        let all = self.record()?;
        let programs = all.programs()?;
        let some = LabRecord { nodes, kubevirt: all.kubevirt };
        self.start_nodes(&some, &programs)?;
        // The other nodes need routes to a new node as well.
        for machine in &all.nodes {
            let others: Vec<_> =
                all.nodes.iter().filter(|n| n.number != machine.number).map(NodeRecord::addresses).collect();
            if self.node(&machine.name).init().is_some() {
                switch::add_pod_routes(&self.node(&machine.name), &others)?;
            }
        }
        self.start_cluster(&some).await
    }

    /// Removes a node: the machine, its disk, and its Node object.
    pub async fn remove_node(&self, name: &str) -> Result<()> {
        require_root()?;
        let _lock = self.lock()?;
        let node = self.node_record(name)?;
        self.node(name).power_off()?;
        let mut record = self.record()?;
        for other in record.nodes.iter().filter(|other| other.name != name) {
            switch::delete_pod_routes(&self.node(&other.name), node.addresses());
        }
        switch::delete_pod_routes(&self.control_plane(), node.addresses());
        paths::remove_dir(&self.dir.join("machines").join(name))?;
        let nodes: Api<KubeNode> = Api::all(self.client().await?);
        match nodes.delete(name, &DeleteParams::default()).await {
            Err(kube::Error::Api(e)) if e.is_not_found() => {}
            other => other.map(|_| ()).with_context(|| format!("delete Node {name}"))?,
        }
        // Last, so that an interrupted command can be repeated.
        record.nodes.retain(|n| n.name != name);
        self.save(&record)
    }

    /// Disconnects a node from the network.
    pub fn partition(&self, name: &str) -> Result<()> {
        self.set_cable(name, CableState::Partitioned)
    }

    /// Reconnects a node.
    pub fn heal(&self, name: &str) -> Result<()> {
        self.set_cable(name, CableState::Connected)
    }

    fn set_cable(&self, name: &str, cable: CableState) -> Result<()> {
        require_root()?;
        let _lock = self.lock()?;
        let node = self.node_record(name)?;
        let mut record = self.record()?;
        for node in record.nodes.iter_mut().filter(|n| n.name == name) {
            node.partitioned = cable == CableState::Partitioned;
        }
        self.save(&record)?;
        switch::set_cable_state(&self.control_plane(), node.addresses(), cable)
    }

    /// Finds a component by name, with or without `kube-`: `etcd`, `apiserver`, `node-1/kubelet`.
    pub fn component(&self, text: &str) -> Result<ComponentRef> {
        let (machine, name) = text.split_once('/').unwrap_or((control_plane::NAME, text));
        let components: Vec<Component> = if machine == control_plane::NAME {
            self.control_plane_components()
        } else {
            node::components(&self.node(machine), &self.node_record(machine)?)
        };
        let names: Vec<String> = components.iter().map(|c| c.name.clone()).collect();
        let matches = |c: &Component| c.name == name || c.name.strip_prefix("kube-") == Some(name);
        let component = components.into_iter().find(matches).with_context(|| {
            format!(
                "{machine} has no component {name}; it has {}; for a component of a node, use NODE/NAME",
                names.join(", ")
            )
        })?;
        Ok(ComponentRef { machine: self.node(machine), component })
    }

    /// Stops a component and starts it again.
    pub fn restart(&self, component: &str) -> Result<()> {
        let target = self.component(component)?;
        target.machine.stop_component(&target.component.name)?;
        target.machine.start_component(&target.component)
    }

    /// Kills a component with SIGKILL; it stays dead until `restart` or `up`.
    pub fn kill(&self, component: &str) -> Result<()> {
        let ComponentRef { machine, component } = self.component(component)?;
        machine.signal_component(&component.name, Signal::SIGKILL)?;
        let what = format!("{} to exit", component.name);
        wait::blocking(Duration::from_secs(60), &what, || {
            let alive = matches!(
                machine.components()?.get(&component.name),
                Some(crate::init::ComponentState::Running { .. })
            );
            Ok((!alive).then_some(()))
        })
    }

    /// Pauses a component with SIGSTOP.
    pub fn pause(&self, component: &str) -> Result<()> {
        let ComponentRef { machine, component } = self.component(component)?;
        machine.signal_component(&component.name, Signal::SIGSTOP)
    }

    /// Continues a paused component with SIGCONT.
    pub fn resume(&self, component: &str) -> Result<()> {
        let ComponentRef { machine, component } = self.component(component)?;
        machine.signal_component(&component.name, Signal::SIGCONT)
    }

    /// Imports an image archive on all nodes and on nodes that are added later.
    pub fn load_image(&self, tar: &Path) -> Result<()> {
        require_root()?;
        let _lock = self.lock()?;
        let stem = tar.file_stem().and_then(|s| s.to_str()).context("the image archive has no file name")?;
        // The prefix keeps it from replacing the lab's own image.
        self.store_image(tar, &format!("user-{stem}"))?;
        for node in self.record()?.nodes {
            self.import_images(&self.node(&node.name), node.options.runtime)?;
        }
        Ok(())
    }

    pub(crate) fn store_image(&self, tar: &Path, name: &str) -> Result<()> {
        let dir = self.dir.join("images");
        fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
        let stored = dir.join(format!("{name}.tar"));
        let partial = dir.join(format!("{name}.partial"));
        fs::copy(tar, &partial).with_context(|| format!("copy {}", tar.display()))?;
        fs::rename(&partial, &stored).with_context(|| format!("store {}", stored.display()))
    }

    /// Imports every stored image that the node does not have yet.
    pub(crate) fn import_images(&self, machine: &Machine, runtime: Runtime) -> Result<()> {
        let what = format!("{} on {}", runtime.component().name, machine.name);
        wait::blocking(Duration::from_secs(60), &what, || Ok(runtime.listens(machine)?.then_some(())))?;
        let imported_dir = machine.disk().join("var/lib/lab-images");
        fs::create_dir_all(&imported_dir).context("create the list of imported images")?;
        let mut images: Vec<_> = fs::read_dir(self.dir.join("images"))?.flatten().map(|e| e.path()).collect();
        images.sort();
        for image in images.iter().filter(|path| path.extension().is_some_and(|e| e == "tar")) {
            let content = fs::read(image).with_context(|| format!("read {}", image.display()))?;
            let digest = sha256_hex(&content);
            let marker = imported_dir.join(image.file_name().context("the image has no file name")?);
            if fs::read_to_string(&marker).is_ok_and(|imported| imported == digest) {
                continue;
            }
            runtime.import(machine, image)?;
            fs::write(&marker, digest).context("record the imported image")?;
        }
        Ok(())
    }
}
