//! The addresses that a network offers.

use api::ipam::IpamSpec;

use super::{BlockGrid, Family};

/// The addresses that a network offers to pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pool {
    pub name: String,
    pub grids: Vec<BlockGrid>,
    pub routes: Vec<api::ipam::Route>,
    /// Whether pods can join the network; false while it is being deleted.
    pub active: bool,
}

impl Pool {
    /// The pool of a network with these block lengths. Leaves out a family whose block length is not known yet.
    pub fn new(name: &str, ipam: &IpamSpec, lengths: impl Fn(Family) -> Option<u8>, active: bool) -> Self {
        let grids = Family::ALL.iter().filter_map(|family| BlockGrid::new(ipam, *family, lengths(*family)?));
        Self { name: name.to_owned(), grids: grids.collect(), routes: ipam.routes.clone(), active }
    }

    pub fn grid(&self, family: Family) -> Option<&BlockGrid> {
        self.grids.iter().find(|grid| grid.family() == family)
    }
}
