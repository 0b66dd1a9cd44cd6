// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package pin

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"maps"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
)

// Name is the file name of a map's pin: its name, the schema version and a
// hash of its layout, so that a build never takes another build's map for its
// own. A bpffs refuses dots, hence the underscores.
func Name(ms *ebpf.MapSpec) string {
	return fmt.Sprintf("%s_v%d_%s", ms.Name, schemaVersion, Layout(ms))
}

// Layout covers the kind of the map, its size and flags, and every field
// of key and value by place and type. The name of a field is not part of it: a
// better word for the same bytes is no reason to begin with empty maps.
func Layout(ms *ebpf.MapSpec) string {
	h := sha256.New()
	fmt.Fprintf(h, "type %v key %d value %d entries %d flags %#x\n",
		ms.Type, ms.KeySize, ms.ValueSize, ms.MaxEntries, ms.Flags)
	writeLayout(h, ms.Key)
	writeLayout(h, ms.Value)
	return hex.EncodeToString(h.Sum(nil)[:4])
}

func writeLayout(w io.Writer, t btf.Type) {
	switch t := btf.UnderlyingType(t).(type) {
	case nil:
		fmt.Fprintln(w, "none")
	case *btf.Struct:
		fmt.Fprintf(w, "struct %d {\n", t.Size)
		for _, m := range t.Members {
			fmt.Fprintf(w, "at %d: ", m.Offset)
			writeLayout(w, m.Type)
		}
		fmt.Fprintln(w, "}")
	case *btf.Array:
		fmt.Fprintf(w, "%d times ", t.Nelems)
		writeLayout(w, t.Type)
	case *btf.Int:
		fmt.Fprintf(w, "%s %d bytes\n", t.Encoding, t.Size)
	case *btf.Enum:
		// values may be added without moving anything
		fmt.Fprintf(w, "enum %d bytes\n", t.Size)
	default:
		fmt.Fprintf(w, "%T\n", t)
	}
}

func sortedKeys[K cmp.Ordered, V any](m map[K]V) []K {
	return slices.Sorted(maps.Keys(m))
}
