//! Signals that something changed on the node that may have repaired the cause of failing attempts.

use tokio::sync::watch;

/// Signals that a link changed, an interface was detached or an address is free. Clones share the receivers. Costs nothing
/// while nothing waits for it.
#[derive(Debug, Clone, Default)]
pub struct Repairs(watch::Sender<()>);

/// Receives the signals.
#[derive(Debug)]
pub struct RepairReceiver(watch::Receiver<()>);

impl Repairs {
    pub fn signal(&self) {
        self.0.send_replace(());
    }

    pub fn subscribe(&self) -> RepairReceiver {
        RepairReceiver(self.0.subscribe())
    }
}

impl RepairReceiver {
    /// Waits for a signal since the last call that returned. Cancel safe.
    pub async fn changed(&mut self) {
        if self.0.changed().await.is_err() {
            // Every sender is gone, because the daemon stops.
            std::future::pending::<()>().await;
        }
    }
}
