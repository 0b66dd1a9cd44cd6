// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package pin

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
)

// LegacyPin is the pin of a map from versions in which field names were part of the layout hash.
type LegacyPin struct {
	Pin    string
	Layout string // Layout of the map at the pin
}

// LegacyPins are the pins of those versions, by map. A map is adopted from there if its layout is still the
// same. Maps without fields have kept their names.
var LegacyPins = map[string]LegacyPin{
	"sl_budget":    {"sl_budget_v1_d8c95a22", "0160a481"},
	"sl_cidr4":     {"sl_cidr4_v1_98523794", "3d4a35b7"},
	"sl_cidr6":     {"sl_cidr6_v1_1d430158", "7f6fddb0"},
	"sl_class_key": {"sl_class_key_v1_ed9b4e8d", "9e29ea88"},
	"sl_ct4":       {"sl_ct4_v1_503fdb9a", "edda730d"},
	"sl_ct6":       {"sl_ct6_v1_8f143a37", "0dddd8ba"},
	"sl_ep":        {"sl_ep_v1_d2a8df11", "ada8dc7c"},
	"sl_events":    {"sl_events_v1_f99dd6d3", "dfde4b6e"},
	"sl_frag":      {"sl_frag_v1_86404be9", "8288b69d"},
	"sl_ip6":       {"sl_ip6_v1_5b21f8be", "e4fbc4af"},
	"sl_ipc4":      {"sl_ipc4_v1_29d8ddaa", "dc676e1e"},
	"sl_ipc6":      {"sl_ipc6_v1_a15318b8", "d22cb60f"},
	"sl_limits":    {"sl_limits_v1_22e55c61", "d8a73a01"},
	"sl_metrics":   {"sl_metrics_v1_b1195aae", "33eec764"},
	"sl_peer":      {"sl_peer_v1_7cd3121b", "df0b06c8"},
	"sl_ports":     {"sl_ports_v1_7b6f0546", "4efa3b39"},
	"sl_rule":      {"sl_rule_v1_228da111", "f1a17f01"},
	"sl_table":     {"sl_table_v1_79e12d76", "86065f77"},
	"sl_table_key": {"sl_table_key_v1_66f11d71", "76a841dd"},
}

// carries are functions that fill a new map from the legacy pin of a map with another layout, before any
// program uses the new map. A map without such a function starts empty: its contents are written again, only
// this process reads them, or the programs move them (see PreviousMaps).
var carries = map[string]func(from, to *ebpf.Map) error{
	bpf.MapsMapSlIpc4: copyPrefixes[bpf.MapsSlPrefix4],
	bpf.MapsMapSlIpc6: copyPrefixes[bpf.MapsSlPrefix6],
}

// carryOver fills the new map of a name from its legacy pin, and reports whether there was one.
func carryOver(dir, name string, to *ebpf.Map) (bool, error) {
	carry, ok := carries[name]
	if !ok {
		return false, nil
	}
	path := filepath.Join(dir, LegacyPins[name].Pin)
	from, err := ebpf.LoadPinnedMap(path, &ebpf.LoadPinOptions{ReadOnly: true})
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("open %s: %w", path, err)
	}
	defer from.Close()
	if from.Type() != to.Type() || from.KeySize() != to.KeySize() || from.ValueSize() != to.ValueSize() {
		return false, fmt.Errorf("%s holds another map; remove it by hand if no program uses it", path)
	}
	if err := carry(from, to); err != nil {
		return false, fmt.Errorf("carry over %s: %w", path, err)
	}
	return true, nil
}

// copyPrefixes copies an ipcache that only had another size.
func copyPrefixes[K bpf.MapsSlPrefix4 | bpf.MapsSlPrefix6](from, to *ebpf.Map) error {
	var key K
	var value bpf.MapsSlIpcache
	it := from.Iterate()
	for it.Next(&key, &value) {
		if err := ReplaceInTrie(to, &key, &value); err != nil {
			return err
		}
	}
	return it.Err()
}
