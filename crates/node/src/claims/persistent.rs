//! The NetworkAttachmentDefinitions with persistent addresses of this cluster. CNI does not pass the keys of a plugin list
//! to its plugins, so a plugin cannot read `allowPersistentIPs` of a list.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, PoisonError, RwLock},
};

use api::{
    ErrorChain,
    nad::{NadIpam, NadNetwork},
    selection::NadRef,
};
use client::watch::{self, StreamEvent, WatchConfig};
use futures::StreamExt as _;
use kube::{Api, Client, ResourceExt as _};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::{
    Error,
    hotplug::nads::{NAD_LIST_PAGE, NadObject},
    pods::OwnPods,
    watch::backoff,
};

/// The name of a CNI config and its BridgeNetwork.
type ConfigNetwork = (String, String);

/// The configs with persistent addresses of `patchbay-ipam`. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct PersistentNads(Arc<RwLock<PersistentConfigs>>);

#[derive(Debug, Default)]
struct PersistentConfigs {
    /// None until the API server has listed the NADs, or said that the kind does not exist.
    nads: Option<BTreeMap<NadRef, ConfigNetwork>>,
    configs: BTreeSet<ConfigNetwork>,
}

/// Fills [`PersistentNads`].
pub struct PersistentNadWatch {
    api: Api<NadObject>,
    nads: PersistentNads,
    pods: OwnPods,
    listing: Option<BTreeMap<NadRef, ConfigNetwork>>,
    failed: bool,
}

/// The NADs and the watch that must run for them. The watch of the node's pods starts with the first persistent one.
pub fn persistent_nads(client: Client, pods: OwnPods) -> (PersistentNads, PersistentNadWatch) {
    let nads = PersistentNads::default();
    let api = Api::all(client);
    (nads.clone(), PersistentNadWatch { api, nads, pods, listing: None, failed: false })
}

impl PersistentNads {
    /// Whether a NAD with this config and network has persistent addresses; None until the NADs have been listed.
    pub fn contains(&self, config: &str, network: &str) -> Option<bool> {
        let known = self.0.read().unwrap_or_else(PoisonError::into_inner);
        known.nads.as_ref()?;
        // Most clusters have none.
        Some(!known.configs.is_empty() && known.configs.contains(&(config.to_owned(), network.to_owned())))
    }

    fn change(&self, change: impl FnOnce(&mut Option<BTreeMap<NadRef, ConfigNetwork>>)) -> bool {
        let mut known = self.0.write().unwrap_or_else(PoisonError::into_inner);
        change(&mut known.nads);
        known.configs = known.nads.iter().flat_map(BTreeMap::values).cloned().collect();
        !known.configs.is_empty()
    }

    /// Pretends that these configs have been listed.
    #[cfg(test)]
    pub fn set(&self, configs: &[(&str, &str)]) {
        let entry = |(index, (config, network)): (usize, &(&str, &str))| {
            (NadRef::new("ns", index.to_string()), ((*config).to_owned(), (*network).to_owned()))
        };
        self.change(|nads| *nads = Some(configs.iter().enumerate().map(entry).collect()));
    }
}

impl PersistentNadWatch {
    /// Watches until `stop`.
    pub async fn run(mut self, stop: CancellationToken) -> Result<(), Error> {
        let config = WatchConfig::all().page_size(NAD_LIST_PAGE).backoff(backoff());
        let mut events = watch::stream(self.api.clone(), config);
        while let Some(Some(event)) = stop.run_until_cancelled(events.next()).await {
            self.apply(event);
        }
        Ok(())
    }

    fn apply(&mut self, event: StreamEvent<NadObject>) {
        match event {
            StreamEvent::ListStarted => self.listing = Some(BTreeMap::new()),
            StreamEvent::Applied(mut object) => {
                let Some(at) = reference(&object) else { return };
                let config = object.take_config();
                let found = persistent(config.as_deref(), &at.name);
                match (&mut self.listing, found) {
                    (Some(listing), found) => listing.extend(found.map(|found| (at, found))),
                    (None, Some(found)) => self.change(|nads| _ = nads.insert(at, found)),
                    (None, None) => self.change(|nads| _ = nads.remove(&at)),
                }
            }
            StreamEvent::Deleted(object) => {
                if let Some(at) = reference(&object) {
                    self.change(|nads| _ = nads.remove(&at));
                }
            }
            StreamEvent::ListDone => {
                let listed = self.listing.take().unwrap_or_default();
                self.replace(listed);
                self.failed = false;
            }
            StreamEvent::NotServed(_) => {
                self.listing = None;
                self.replace(BTreeMap::new());
            }
            StreamEvent::Resumed => self.failed = false,
            StreamEvent::Failed(error) => {
                self.listing = None;
                if !self.failed {
                    warn!(
                        error = %ErrorChain(&error),
                        "cannot watch the NetworkAttachmentDefinitions with persistent addresses; retrying"
                    );
                }
                self.failed = true;
            }
        }
    }

    fn change(&self, change: impl FnOnce(&mut BTreeMap<NadRef, ConfigNetwork>)) {
        let any = self.nads.change(|nads| {
            if let Some(nads) = nads {
                change(nads);
            }
        });
        if any {
            self.pods.want();
        }
    }

    fn replace(&self, listed: BTreeMap<NadRef, ConfigNetwork>) {
        if self.nads.change(|nads| *nads = Some(listed)) {
            self.pods.want();
        }
    }
}

fn reference(object: &NadObject) -> Option<NadRef> {
    Some(NadRef::new(object.namespace()?, object.name_any()))
}

/// The config of a NAD and its network, if its addresses are persistent. A config that cannot be read attaches no pod.
fn persistent(config: Option<&str>, nad: &str) -> Option<ConfigNetwork> {
    match NadNetwork::read(config, nad).ok()? {
        NadNetwork { name, persistent: true, ipam: NadIpam::Patchbay { network } } => Some((name, network)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn nad(name: &str, config: &serde_json::Value) -> NadObject {
        let metadata = json!({"namespace": "ns", "name": name, "resourceVersion": "1"});
        serde_json::from_value(json!({"metadata": metadata, "spec": {"config": config.to_string()}})).unwrap()
    }

    #[test]
    fn configs_are_known_after_the_list_and_follow_changes() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let _inside = runtime.enter();
        let client = Client::try_from(kube::Config::new("http://127.0.0.1:1".parse().unwrap()));
        let (nads, mut watch) = persistent_nads(client.unwrap(), OwnPods::unlisted());
        let ipam = json!({"type": "patchbay-ipam", "network": "blue"});
        let list =
            json!({"name": "n", "allowPersistentIPs": true, "plugins": [{"type": "macvlan", "ipam": ipam}]});
        let ordinary = json!({"name": "n", "type": "patchbay-bridge", "network": "blue", "ipam": ipam});
        let ovn = json!({"name": "n", "type": "ovn-k8s-cni-overlay", "allowPersistentIPs": true});
        assert_eq!(nads.contains("n", "blue"), None);
        watch.apply(StreamEvent::ListStarted);
        for (name, config) in [("a", &list), ("b", &ordinary), ("c", &ovn), ("d", &json!("{"))] {
            watch.apply(StreamEvent::Applied(nad(name, config)));
        }
        assert_eq!(nads.contains("n", "blue"), None, "the list may have more");
        watch.apply(StreamEvent::ListDone);
        for (config, network, expected) in [("n", "blue", true), ("n", "red", false), ("m", "blue", false)] {
            assert_eq!(nads.contains(config, network), Some(expected), "{config} {network}");
        }
        watch.apply(StreamEvent::Applied(nad("e", &list)));
        watch.apply(StreamEvent::Applied(nad("a", &ordinary)));
        assert_eq!(nads.contains("n", "blue"), Some(true), "another NAD has the config");
        watch.apply(StreamEvent::Deleted(nad("e", &list)));
        assert_eq!(nads.contains("n", "blue"), Some(false));
    }
}
