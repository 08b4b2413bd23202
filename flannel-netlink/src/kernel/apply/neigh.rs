//! Steps for neighbours and FDB entries.

use flannel_core::kernel::KernelError;
use flannel_core::object::{Fdb, Neigh};

use super::{Steps, Writer};
use crate::codec::fdb::Special;
use crate::codec::{fdb, neigh};

impl Steps for Neigh {
    fn put(&self, writer: &mut Writer<'_>, n: usize, index: u32) -> Result<(), KernelError> {
        neigh::put(writer.batch.put(n), self, index);
        Ok(())
    }

    fn delete(&self, writer: &mut Writer<'_>, n: usize, index: u32) -> Result<(), KernelError> {
        neigh::delete(writer.batch.delete(n), self, index);
        Ok(())
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
