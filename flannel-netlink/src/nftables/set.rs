//! Sets of nf_tables, and transactions that change their elements.

use flannel_core::address::Family;
use flannel_core::kernel::KernelError;

use crate::netfilter::{Attributes, Batch, Make, Messages, NetfilterMessage, NetfilterSocket};
use crate::nftables::attributes::{find, number, number_in};
use crate::nftables::table::TABLE;
use crate::nftables::{Table, batch, present};

/// `NFT_MSG_…`.
const NEWSET: u8 = 9;
const GETSET: u8 = 10;
const NEWSETELEM: u8 = 12;
const GETSETELEM: u8 = 13;
const DELSETELEM: u8 = 14;
/// `NFTA_SET_…` and `NFTA_SET_ELEM_LIST_…`.
const SET_NAME: u16 = 2;
const SET_FLAGS: u16 = 3;
const SET_KEY_TYPE: u16 = 4;
const SET_KEY_LEN: u16 = 5;
const SET_DATA_TYPE: u16 = 6;
const SET_DATA_LEN: u16 = 7;
const SET_ID: u16 = 10;
const SET_USERDATA: u16 = 13;
const ELEMENTS: u16 = 3;
/// `NFT_SET_MAP`.
const MAP: u32 = 8;
/// `NFTA_LIST_ELEM`, `NFTA_SET_ELEM_KEY`, `NFTA_SET_ELEM_DATA`, `NFTA_DATA_VALUE`.
const ELEMENT: u16 = 1;
const KEY: u16 = 1;
const DATA: u16 = 2;
const VALUE: u16 = 1;
/// `ipv4_addr` and `ipv6_addr` of `nft`.
const IPV4_ADDRESS: u32 = 7;
const IPV6_ADDRESS: u32 = 8;
/// `mark` of `nft`, and its bytes.
const MARK: u32 = 19;
const MARK_LEN: u32 = 4;
/// The bits of each type in a concatenation of types.
const TYPE_BITS: u32 = 6;
/// For `nft`: types of user data (`NFTNL_UDATA_SET_KEYBYTEORDER` and `_DATABYTEORDER`), and the
/// orders of bytes (`BYTEORDER_HOST_ENDIAN` and `_BIG_ENDIAN`).
const KEY_ORDER: u8 = 0;
const DATA_ORDER: u8 = 1;
const OF_MACHINE: u32 = 1;
const BIG_ENDIAN: u32 = 2;
/// The bytes of an element in a message without its value: the headers of three attributes, or of
/// five in a map.
const OVERHEAD: usize = 20;
/// The largest number of bytes of elements in a message. The kernel sends a refused message back,
/// into a buffer of 32 KiB.
const MOST: usize = 28_000;
/// The largest number of bytes of elements in a transaction. The send buffer of a socket has 200
/// KiB.
const MOST_IN_BATCH: usize = 4 * MOST;
/// The largest number of changes in a transaction ([`Batch::add`]).
const MOST_CHANGES: usize = 200;

/// A set or a map whose keys are addresses, or a mark and addresses.
///
/// A rule can look up one address, or 4 bytes and an address: see
/// [`Expr::AppendHeader`](crate::nftables::Expr::AppendHeader).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Set<'a> {
    /// Its table.
    pub table: Table<'a>,
    /// The family of the addresses.
    pub family: Family,
    /// Its name.
    pub name: &'a str,
    /// The number of addresses in a key.
    pub addresses: u32,
    /// Whether there are marks too.
    pub marks: Marks,
}

/// The marks in a [`Set`]: numbers of 4 bytes in the machine's byte order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Marks {
    /// The set has no marks.
    #[default]
    None,
    /// A key is a mark, followed by the addresses.
    First,
    /// The set is a map from the addresses to a mark, which is at the end of an element.
    Value,
}

/// A set without its elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct SetHead {
    /// `NFT_SET_…`. See [`Set::flags`].
    pub flags: u32,
    /// The length of an element in bytes.
    pub element_len: u32,
}

impl Set<'_> {
    /// The length of an element in bytes.
    pub fn element_len(&self) -> u32 {
        self.addresses_len() + if self.marks == Marks::None { 0 } else { MARK_LEN }
    }

    /// The flags of the set in the kernel (`NFT_SET_…`).
    pub fn flags(&self) -> u32 {
        if self.marks == Marks::Value { MAP } else { 0 }
    }

    fn addresses_len(&self) -> u32 {
        self.addresses * u32::from(self.family.bits() / 8)
    }

    fn key_len(&self) -> u32 {
        if self.marks == Marks::Value { self.addresses_len() } else { self.element_len() }
    }

    fn named(&self, request: &mut Messages) {
        request.text(TABLE, self.table.name).text(SET_NAME, self.name);
    }

    /// Adds the change that creates the set. Each set in the batch needs another `id`.
    pub fn make(&self, batch: &mut Batch, id: u32) {
        let address = match self.family {
            Family::V4 => IPV4_ADDRESS,
            Family::V6 => IPV6_ADDRESS,
        };
        let first = if self.marks == Marks::First { MARK } else { 0 };
        let kind = (0..self.addresses).fold(first, |kind, _| kind << TYPE_BITS | address);
        batch.add(NEWSET, self.table.family.protocol(), Make::Create, |request| {
            self.named(request);
            number(number(request, SET_FLAGS, self.flags()), SET_KEY_TYPE, kind);
            number(number(request, SET_KEY_LEN, self.key_len()), SET_ID, id);
            if self.marks == Marks::Value {
                number(number(request, SET_DATA_TYPE, MARK), SET_DATA_LEN, MARK_LEN);
                let order = |kind, order: u32| [&[kind, 4], &order.to_ne_bytes()[..]].concat();
                let orders = [order(KEY_ORDER, BIG_ENDIAN), order(DATA_ORDER, OF_MACHINE)];
                request.attr(SET_USERDATA, &orders.concat());
            }
        });
    }

    /// The set without its elements, or `None` if it does not exist.
    ///
    /// # Errors
    /// The kernel has no nf_tables, or this process lacks `CAP_NET_ADMIN`.
    pub fn head(&self, socket: &mut NetfilterSocket) -> Result<Option<SetHead>, KernelError> {
        let read = |message: &NetfilterMessage<'_>| {
            let attributes = message.attributes.0;
            let flags = number_in(attributes, SET_FLAGS).unwrap_or_default();
            let data_len = number_in(attributes, SET_DATA_LEN).unwrap_or_default();
            let key_len = number_in(attributes, SET_KEY_LEN)?;
            Some(SetHead { flags, element_len: key_len.saturating_add(data_len) })
        };
        present(socket.ask(self.table.kind(GETSET), |request| self.named(request), read))
    }

    /// The elements, each the bytes of its key and of its value. While the kernel resizes the set,
    /// which it does some time after changes, it may list an element twice, or leave one out.
    ///
    /// # Errors
    /// The set does not exist (`ENOENT`), the kernel has no nf_tables, or this process lacks
    /// `CAP_NET_ADMIN`.
    pub fn elements(&self, socket: &mut NetfilterSocket) -> Result<Vec<Vec<u8>>, KernelError> {
        let read = |message: &NetfilterMessage<'_>| {
            let list = find(message.attributes.0, ELEMENTS).unwrap_or_default();
            Some(Attributes(list).filter_map(|(_, bytes)| element(bytes)).collect::<Vec<_>>())
        };
        let parts =
            socket.dump(self.table.kind(GETSETELEM), |request| self.named(request), read)?;
        Ok(parts.into_iter().flatten().collect())
    }
}

/// The key and the value of an element.
fn element(attributes: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = find(find(attributes, KEY)?, VALUE)?.to_vec();
    bytes.extend(find(attributes, DATA).and_then(|data| find(data, VALUE)).unwrap_or_default());
    Some(bytes)
}

/// Changes of sets, in as many transactions as the elements need, because the kernel limits the
/// size of a transaction.
#[derive(Debug, Default)]
pub struct Batches {
    batches: Vec<Batch>,
    /// The bytes of elements in the last batch.
    bytes: usize,
}

impl Batches {
    /// Whether there is nothing to commit.
    pub fn is_empty(&self) -> bool {
        self.batches.is_empty()
    }

    /// The last transaction, for changes that belong together. All transactions have room for 200
    /// changes ([`Batch::add`]).
    pub fn last(&mut self) -> &mut Batch {
        if self.batches.is_empty() {
            self.begin();
        }
        self.batches.last_mut().expect("there is one")
    }

    /// Adds elements. Elements that exist stay as they are. Each has the length
    /// [`Set::element_len`].
    pub fn put(&mut self, set: &Set<'_>, elements: &[Vec<u8>]) {
        self.change(NEWSETELEM, Make::Create, set, elements);
    }

    /// Deletes elements, which must exist.
    pub fn delete(&mut self, set: &Set<'_>, elements: &[Vec<u8>]) {
        self.change(DELSETELEM, Make::Nothing, set, elements);
    }

    fn begin(&mut self) {
        self.batches.push(batch());
        self.bytes = 0;
    }

    fn change(&mut self, number: u8, make: Make, set: &Set<'_>, elements: &[Vec<u8>]) {
        let len = OVERHEAD + set.element_len() as usize;
        for elements in elements.chunks((MOST / len).max(1)) {
            let more = elements.len() * len;
            if self.bytes + more > MOST_IN_BATCH || self.last().len() >= MOST_CHANGES {
                self.begin();
            }
            self.bytes += more;
            self.last().add(number, set.table.family.protocol(), make, |request| {
                set.named(request);
                request.nest(ELEMENTS, |list| {
                    for bytes in elements {
                        let (key, mark) = bytes.split_at(bytes.len().min(set.key_len() as usize));
                        list.nest(ELEMENT, |element| {
                            element.nest(KEY, |value| _ = value.attr(VALUE, key));
                            if !mark.is_empty() {
                                element.nest(DATA, |value| _ = value.attr(VALUE, mark));
                            }
                        });
                    }
                });
            });
        }
    }
}

impl IntoIterator for Batches {
    type Item = Batch;
    type IntoIter = std::vec::IntoIter<Batch>;

    /// The transactions in their order.
    fn into_iter(self) -> Self::IntoIter {
        self.batches.into_iter()
    }
}
