//! What the block controller reads and changes of this node's addresses.

use std::collections::BTreeMap;

use plan::ipam::{BlockKey, BlockPlanInput, BlockStep, Contact, Holding, Ledger, LedgerRecord};
use tracing::{info, warn};

use super::{Ipam, JournalError, waiters::PendingRequest};

/// How often one call of [`Ipam::plan`] plans again after it has applied records.
const MAX_PLAN_ROUNDS: usize = 64;

impl Ipam {
    /// The blocks and single addresses that this node holds or acquires.
    pub fn holdings(&self) -> Vec<(BlockKey, Holding)> {
        self.lock().ledger.holdings().iter().map(|(block, one)| (block.clone(), one.clone())).collect()
    }

    /// Sets which of this node's IPBlocks the API server has. No other block serves addresses.
    pub(super) fn set_confirmed(&self, confirmed: BTreeMap<String, String>) {
        self.lock().confirmed = confirmed;
        self.changed.notify_all();
    }

    pub(super) fn set_contact(&self, contact: Contact) {
        let mut state = self.lock();
        state.contact = state.contact.observe(contact);
        drop(state);
        self.changed.notify_all();
    }

    /// Journals the planned records until none is left, and returns the other steps.
    pub(super) fn plan(&self, input: BlockPlanInput<'_>) -> Result<Vec<BlockStep>, JournalError> {
        let mut state = self.lock();
        let pending = state.waiters.pending();
        let input = BlockPlanInput { pending: &pending, ..input };
        for _ in 0..MAX_PLAN_ROUNDS {
            let (records, steps): (Vec<BlockStep>, Vec<BlockStep>) =
                plan::ipam::blocks::plan(&state.ledger, input)
                    .into_iter()
                    .partition(|step| matches!(step, BlockStep::Record(_)));
            let records: Vec<LedgerRecord> = records
                .into_iter()
                .filter_map(|step| if let BlockStep::Record(record) = step { Some(record) } else { None })
                .collect();
            if records.is_empty() {
                return Ok(steps);
            }
            for record in &records {
                info!(?record, "recorded");
                if let LedgerRecord::Unverified { block, network, .. } = record {
                    warn!(
                        network,
                        block = %block.range,
                        "block is not in the journal; existing allocations are kept, new ones are disabled until reboot or \
                        until the current pods exit"
                    );
                }
            }
            self.append(&mut state, &records)?;
            self.update_metrics(&state);
            self.changed.notify_all();
        }
        warn!("planning of address blocks does not converge");
        Ok(Vec::new())
    }

    /// Journals and applies a record.
    pub(super) fn record(&self, record: LedgerRecord) -> Result<(), JournalError> {
        let mut state = self.lock();
        self.append(&mut state, &[record])?;
        self.update_metrics(&state);
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    pub(super) fn with_ledger<T>(&self, read: impl FnOnce(&Ledger) -> T) -> T {
        read(&self.lock().ledger)
    }

    /// Fails the ADDs that wait for a request.
    pub(super) fn fail_request(&self, request: PendingRequest, reason: String) {
        if self.lock().waiters.fail(request.clone(), reason.clone()) {
            info!(?request, reason, "failing the ADDs that wait for addresses");
        }
        self.changed.notify_all();
    }

    /// Whether an ADD waits for addresses.
    pub(crate) fn has_waiters(&self) -> bool {
        !self.lock().waiters.is_empty()
    }

    /// Whether an ADD waits for this.
    pub(super) fn is_waiting(&self, request: &PendingRequest) -> bool {
        self.lock().waiters.contains(request)
    }

    /// What the ADDs wait for.
    pub(super) fn waiting_requests(&self) -> Vec<PendingRequest> {
        self.lock().waiters.requests().cloned().collect()
    }
}
