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

// Name returns the file name of a map's pin: the map's name, the schema version and a hash of its layout, so
// that a build never adopts a map of another layout. A bpffs does not allow dots, hence the underscores.
func Name(ms *ebpf.MapSpec) string {
	return fmt.Sprintf("%s_v%d_%s", ms.Name, schemaVersion, Layout(ms))
}

// Layout returns a hash of the map's type, size and flags, and of the offset and type of every field of key and
// value. Field names are not part of it, so that renaming a field does not discard the map's contents.
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
		// new values do not change the layout
		fmt.Fprintf(w, "enum %d bytes\n", t.Size)
	default:
		fmt.Fprintf(w, "%T\n", t)
	}
}

func sortedKeys[K cmp.Ordered, V any](m map[K]V) []K {
	return slices.Sorted(maps.Keys(m))
}
