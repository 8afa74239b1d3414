//! Metrics of address management.

use prometheus_client::{
    metrics::{counter::Counter, gauge::Gauge},
    registry::Registry,
};

/// Metrics of address management.
#[derive(Debug, Clone, Default)]
pub struct Metrics {
    pub addresses: Gauge,
    pub blocks: Gauge,
    pub acquired: Counter,
    pub borrowed: Counter,
    pub released: Counter,
    pub exhausted: Counter,
    pub collected: Counter,
}

impl Metrics {
    pub fn register(&self, registry: &mut Registry) {
        registry.register("ipam_interfaces", "Interfaces with addresses", self.addresses.clone());
        registry.register("ipam_blocks", "Address blocks and single addresses held", self.blocks.clone());
        registry.register("ipam_blocks_taken", "Address blocks acquired", self.acquired.clone());
        registry.register(
            "ipam_addresses_borrowed",
            "Single addresses requested from other nodes",
            self.borrowed.clone(),
        );
        registry.register(
            "ipam_blocks_given_back",
            "Address blocks and single addresses released",
            self.released.clone(),
        );
        let help = "Times that a network had no free address";
        registry.register("ipam_exhausted", help, self.exhausted.clone());
        let help = "Interfaces whose addresses were released because their sandbox no longer existed";
        registry.register("ipam_swept", help, self.collected.clone());
    }
}
