//! Steps for neighbours and FDB entries.

use flannel_core::kernel::KernelError;
use flannel_core::object::{Fdb, Neigh};

use super::{Steps, Writer};
use crate::codec::fdb::Special;
use crate::codec::{fdb, neigh};

impl Steps for Neigh {
    fn put(&self, writer: &mut Writer<'_>, n: usize, index: u32) -> Result<(), KernelError> {
        writer.delete_proxy(n, self, index);
        neigh::put(writer.batch.put(n), self, index);
        Ok(())
    }

    fn delete(&self, writer: &mut Writer<'_>, n: usize, index: u32) -> Result<(), KernelError> {
        writer.delete_proxy(n, self, index);
        neigh::delete(writer.batch.delete(n), self, index);
        Ok(())
    }
}

impl Writer<'_> {
    /// Deletes the proxy entry for the address of the neighbour, if the last snapshot showed one.
    fn delete_proxy(&mut self, n: usize, neigh: &Neigh, index: u32) {
        if self.foreign.take_proxy(index, neigh.address) {
            neigh::delete_proxy(self.batch.delete(n), neigh.address, index);
        }
    }
}

impl Steps for Fdb {
    fn put(&self, writer: &mut Writer<'_>, n: usize, index: u32) -> Result<(), KernelError> {
        if writer.foreign.take_special(index, self.mac) == Some(Special::ByNexthop) {
            fdb::delete_any(writer.batch.delete(n), self.mac, index);
        }
        fdb::put(writer.batch.put(n), self, index);
        Ok(())
    }

    fn delete(&self, writer: &mut Writer<'_>, n: usize, index: u32) -> Result<(), KernelError> {
        let requests = writer.batch.delete(n);
        match writer.foreign.take_special(index, self.mac) {
            Some(_) => fdb::delete_any(requests, self.mac, index),
            None => fdb::delete(requests, self, index),
        }
        Ok(())
    }
}
