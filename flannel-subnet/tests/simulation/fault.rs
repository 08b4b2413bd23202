//! All kinds of faults, and how often each happened.

/// A kind of fault. Each must happen in a full run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    LostRequest,
    LostReply,
    LateRequest,
    Duplicate,
    SlowReply,
    LateReply,
    CrashKeepingState,
    CrashLosingHolderId,
    CrashLosingSubnetFile,
    CrashLosingState,
    Partition,
    Suspension,
    StoreOutage,
    StoreRestart,
    Compaction,
    Expiry,
    KeyDeleted,
    HolderRevoked,
    Reserved,
    Overwritten,
    ForeignLease,
    WallForward,
    WallBack,
    /// A machine starts with the wall clock of its last end.
    WallRestored,
    /// A wrong wall clock is corrected.
    WallCorrected,
    /// A daemon uses the lease of its cache, whose end only the wall clock can tell.
    CachedLease,
    Published,
    ConfigChanged,
}

impl Fault {
    pub(crate) const ALL: [Self; 28] = [
        Self::LostRequest,
        Self::LostReply,
        Self::LateRequest,
        Self::Duplicate,
        Self::SlowReply,
        Self::LateReply,
        Self::CrashKeepingState,
        Self::CrashLosingHolderId,
        Self::CrashLosingSubnetFile,
        Self::CrashLosingState,
        Self::Partition,
        Self::Suspension,
        Self::StoreOutage,
        Self::StoreRestart,
        Self::Compaction,
        Self::Expiry,
        Self::KeyDeleted,
        Self::HolderRevoked,
        Self::Reserved,
        Self::Overwritten,
        Self::ForeignLease,
        Self::WallForward,
        Self::WallBack,
        Self::WallRestored,
        Self::WallCorrected,
        Self::CachedLease,
        Self::Published,
        Self::ConfigChanged,
    ];
}

/// The number of faults of each kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counts([u64; Fault::ALL.len()]);

impl Counts {
    pub(crate) fn count(&mut self, fault: Fault) {
        self.0[fault as usize] += 1;
    }

    pub(crate) fn add(&mut self, other: &Self) {
        self.0.iter_mut().zip(other.0).for_each(|(sum, n)| *sum += n);
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (Fault, u64)> {
        Fault::ALL.into_iter().zip(self.0)
    }
}
