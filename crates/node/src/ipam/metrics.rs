//! What can be counted about addresses.

use prometheus_client::{
    metrics::{counter::Counter, gauge::Gauge},
    registry::Registry,
};

/// The numbers of the addresses.
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
    /// Shows the numbers.
    pub fn register(&self, registry: &mut Registry) {
        registry.register("ipam_interfaces", "Interfaces with addresses", self.addresses.clone());
        registry.register("ipam_blocks", "Address blocks and single addresses held", self.blocks.clone());
        registry.register("ipam_blocks_taken", "Address blocks taken", self.acquired.clone());
        registry.register(
            "ipam_addresses_borrowed",
            "Single addresses asked of others",
            self.borrowed.clone(),
        );
        registry.register("ipam_blocks_given_back", "Blocks and addresses given back", self.released.clone());
        let help = "Times that a network had no address left";
        registry.register("ipam_exhausted", help, self.exhausted.clone());
        let help = "Interfaces whose addresses were freed because their sandbox was gone";
        registry.register("ipam_swept", help, self.collected.clone());
    }
}
