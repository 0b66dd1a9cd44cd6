// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package store

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"math/bits"
	"os"
)

// The layout of a bbolt file, version 2, unchanged since 2013. Numbers are in the machine's byte order; the magic
// number differs in a file of the other byte order.
const (
	magic       = 0xED0CDAED
	fileVersion = 2
	headerSize  = 16 // of a page
	elementSize = 16 // of an element of a branch or leaf page
	metaSize    = 64
	flagBranch  = 0x01
	flagLeaf    = 0x02
	flagMeta    = 0x04
	flagBucket  = 0x01 // of a leaf element
	noFreelist  = ^uint64(0)
	maxDepth    = 32
	minPageSize = 1 << 10
	maxPageSize = 1 << 16
)

var order = binary.NativeEndian

// checkPages reads a bbolt file as bytes and returns an error if its structure is invalid.
//
// bbolt maps the file into memory and trusts its content. A corrupt page number makes it panic in a
// goroutine where the panic cannot be recovered, or access memory beyond the end of a truncated
// file, which kills the process with SIGBUS. So the structure is checked first, with plain reads.
func checkPages(f *os.File) error {
	info, err := f.Stat()
	if err != nil {
		return err
	}
	w := &pageWalk{f: f, size: uint64(info.Size())}
	if err := w.findMeta(); err != nil {
		return err
	}
	w.seen = make([]uint64, (w.high+63)/64)
	return w.tree(w.root, nil, nil, 0)
}

type pageWalk struct {
	f        *os.File
	size     uint64 // of the file, in bytes
	pageSize uint64
	root     uint64 // page number of the root bucket
	high     uint64 // number of the first page that was never used
	seen     []uint64
	pages    [][]byte // by depth; a page stays valid while the pages below it are checked
}

// findMeta reads the two meta pages and uses the newer one. Both must be intact: if the newer one were corrupt and
// ignored, the file would be read in its state before the last commit. A loss of power cannot corrupt a meta page,
// because its 80 bytes are within one sector, which storage writes atomically.
func (w *pageWalk) findMeta() error {
	if w.size == 0 {
		return errors.New("the file is empty")
	}
	first, err := w.meta(0)
	if err != nil {
		return fmt.Errorf("header 0: %w", err)
	}
	second, err := w.meta(first.pageSize)
	if err != nil {
		return fmt.Errorf("header 1: %w", err)
	}
	m := first
	if second.commit > first.commit {
		m = second
	}
	w.pageSize, w.root, w.high = m.pageSize, m.root, m.high
	switch {
	case second.pageSize != first.pageSize:
		return fmt.Errorf("its headers have page sizes of %d and %d bytes", first.pageSize, second.pageSize)
	case m.commit != first.commit+1 && m.commit != second.commit+1:
		return fmt.Errorf("its headers are of commits %d and %d", first.commit, second.commit)
	case m.freelist != noFreelist:
		return fmt.Errorf("%w: it has a page of free pages, which Sluice never writes", errOtherWriter)
	case w.high > w.size/w.pageSize:
		return fmt.Errorf("it is truncated: %d bytes, its header requires %d pages of %d bytes", w.size, w.high, w.pageSize)
	}
	return nil
}

// meta is a header page.
type meta struct{ pageSize, root, freelist, high, commit uint64 }

func (w *pageWalk) meta(at uint64) (meta, error) {
	b := make([]byte, headerSize+metaSize)
	if err := w.read(b, at); err != nil {
		return meta{}, err
	}
	m := b[headerSize:]
	sum := fnv.New64a()
	sum.Write(m[:56])
	size := uint64(order.Uint32(m[8:]))
	if order.Uint16(b[8:])&flagMeta == 0 || order.Uint32(m) != magic || order.Uint32(m[4:]) != fileVersion ||
		order.Uint64(m[56:]) != sum.Sum64() || size < minPageSize || size > maxPageSize || bits.OnesCount64(size) != 1 {
		return meta{}, errors.New("not a header of a bbolt database in this machine's byte order")
	}
	return meta{size, order.Uint64(m[16:]), order.Uint64(m[32:]), order.Uint64(m[40:]), order.Uint64(m[48:])}, nil
}

// errOtherWriter is returned for a file that seems intact, but was written by another program.
var errOtherWriter = errors.New("written by another program")

// tree checks a page and everything below it. Keys must be at least low and below high, if these
// are given.
func (w *pageWalk) tree(id uint64, low, high []byte, depth int) error {
	if depth > maxDepth {
		return fmt.Errorf("page %d: deeper than %d levels", id, maxDepth)
	}
	if id < 2 || id >= w.high {
		return fmt.Errorf("a reference to page %d of %d", id, w.high)
	}
	for len(w.pages) <= depth {
		w.pages = append(w.pages, make([]byte, w.pageSize))
	}
	page := w.pages[depth][:w.pageSize]
	if err := w.read(page, id*w.pageSize); err != nil {
		return err
	}
	overflow := uint64(order.Uint32(page[12:]))
	if id+overflow >= w.high {
		return fmt.Errorf("page %d: extends to page %d of %d", id, id+overflow, w.high)
	}
	if got := order.Uint64(page); got != id {
		return fmt.Errorf("page %d: has the page number %d", id, got)
	}
	for p := id; p <= id+overflow; p++ {
		if w.seen[p/64]>>(p%64)&1 == 1 {
			return fmt.Errorf("page %d: used twice", p)
		}
		w.seen[p/64] |= 1 << (p % 64)
	}
	if overflow > 0 {
		page = append(page, make([]byte, overflow*w.pageSize)...)
		if err := w.read(page[w.pageSize:], (id+1)*w.pageSize); err != nil {
			return err
		}
		w.pages[depth] = page
	}
	if err := w.elements(page, low, high, depth); err != nil {
		return fmt.Errorf("page %d: %w", id, err)
	}
	return nil
}

func (w *pageWalk) read(b []byte, at uint64) error {
	if _, err := w.f.ReadAt(b, int64(at)); err != nil {
		if errors.Is(err, io.EOF) {
			return errors.New("it is truncated")
		}
		return err
	}
	return nil
}

// elements checks the content of a page, or of a small bucket that is stored inline in its parent's
// page.
func (w *pageWalk) elements(page, low, high []byte, depth int) error {
	flags, count := order.Uint16(page[8:]), uint64(order.Uint16(page[10:]))
	if flags != flagBranch && flags != flagLeaf {
		return fmt.Errorf("flags %#x", flags)
	}
	if headerSize+count*elementSize > uint64(len(page)) {
		return fmt.Errorf("%d elements do not fit", count)
	}
	part := func(from, length uint64) ([]byte, error) {
		if from > uint64(len(page)) || length > uint64(len(page))-from {
			return nil, errors.New("an element reaches beyond the page")
		}
		return page[from : from+length], nil
	}
	if flags == flagLeaf {
		var last []byte
		for i := range count {
			at := headerSize + i*elementSize
			e := page[at:]
			pos, keySize, valueSize := uint64(order.Uint32(e[4:])), uint64(order.Uint32(e[8:])), uint64(order.Uint32(e[12:]))
			key, err := part(at+pos, keySize)
			if err != nil {
				return err
			}
			value, err := part(at+pos+keySize, valueSize)
			if err != nil {
				return err
			}
			if err := inOrder(key, last, low, high); err != nil {
				return err
			}
			last = key
			switch f := order.Uint32(e); {
			case f == 0:
			case f != flagBucket || len(value) < headerSize:
				return fmt.Errorf("an element with flags %#x and %d bytes", f, len(value))
			default:
				if err := w.bucket(value, depth); err != nil {
					return fmt.Errorf("bucket %.40q: %w", key, err)
				}
			}
		}
		return nil
	}
	if count == 0 {
		return errors.New("a branch without children")
	}
	key := func(i uint64) ([]byte, error) {
		at := headerSize + i*elementSize
		return part(at+uint64(order.Uint32(page[at:])), uint64(order.Uint32(page[at+4:])))
	}
	var last []byte
	for i := range count {
		first, err := key(i)
		if err != nil {
			return err
		}
		if err := inOrder(first, last, low, high); err != nil {
			return err
		}
		last = first
		next := high
		if i+1 < count {
			if next, err = key(i + 1); err != nil {
				return err
			}
		}
		if err := w.tree(order.Uint64(page[headerSize+i*elementSize+8:]), first, next, depth+1); err != nil {
			return err
		}
	}
	return nil
}

// bucket checks a nested bucket: its root page, or the inline page in its value.
func (w *pageWalk) bucket(value []byte, depth int) error {
	if root := order.Uint64(value); root != 0 {
		return w.tree(root, nil, nil, depth+1)
	}
	inline := value[headerSize:]
	if len(inline) < headerSize || order.Uint16(inline[8:]) != flagLeaf || depth > maxDepth {
		return errors.New("not a bucket")
	}
	return w.elements(inline, nil, nil, depth+1)
}

func inOrder(key, last, low, high []byte) error {
	if len(key) == 0 || last != nil && bytes.Compare(key, last) <= 0 ||
		low != nil && bytes.Compare(key, low) < 0 || high != nil && bytes.Compare(key, high) >= 0 {
		return fmt.Errorf("key %.40q is out of order", key)
	}
	return nil
}
