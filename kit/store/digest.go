// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package store

import (
	"crypto/sha256"
	"encoding/binary"
)

// digest is an order-independent checksum over all records, so that a commit can update it from the
// changed records only.
type digest struct{ sum, count uint64 }

func (d *digest) add(bucket string, key, value []byte) {
	d.sum += recordSum(bucket, key, value)
	d.count++
}

func (d *digest) remove(bucket string, key, value []byte) {
	d.sum -= recordSum(bucket, key, value)
	d.count--
}

func (d digest) bytes() []byte {
	return binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(nil, d.sum), d.count)
}

func recordSum(bucket string, key, value []byte) uint64 {
	h := sha256.New()
	var n [4]byte
	for _, part := range [][]byte{[]byte(bucket), key, value} {
		binary.BigEndian.PutUint32(n[:], uint32(len(part)))
		h.Write(n[:])
		h.Write(part)
	}
	var sum [sha256.Size]byte
	return binary.BigEndian.Uint64(h.Sum(sum[:0]))
}
