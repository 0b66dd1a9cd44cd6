// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package labels

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-net/sluice/model/label"
)

// Keys of the labels that Sluice adds under label.SourceGenerated. No selector sees them.
const (
	// KeyNamedPorts carries the names of a workload's ports, because rules may
	// refer to a port by name: two workloads with equal labels and different
	// ports must be two identities.
	KeyNamedPorts = "named-ports"
)

// Protocol is a transport protocol that has ports.
type Protocol string

// Protocols.
const (
	TCP  Protocol = "TCP"
	UDP  Protocol = "UDP"
	SCTP Protocol = "SCTP"
)

// NamedPort is a port that policies may refer to by name.
type NamedPort struct {
	Name     string // RFC 6335: 1 to 15 of a-z, 0-9 and "-"; compared with case
	Port     uint16 // not 0
	Protocol Protocol
}

// ErrNamedPort is in every error about a named port.
var ErrNamedPort = errors.New("invalid named port")

var portNameRE = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,13}[a-z0-9])?$`)

// NamedPortsLabel returns the hidden label of some named ports, sorted and
// deduplicated: "dns.UDP.53_http.TCP.80". ok is false if there are none.
func NamedPortsLabel(ports []NamedPort) (l label.Label, ok bool, err error) {
	if len(ports) == 0 {
		return label.Label{}, false, nil
	}
	texts := make([]string, len(ports))
	for i, p := range ports {
		switch {
		case !portNameRE.MatchString(p.Name):
			return label.Label{}, false, fmt.Errorf("%w: named_ports[%d].name: %q: want 1 to 15 of a-z, 0-9 and \"-\"", ErrNamedPort, i, p.Name)
		case p.Port == 0:
			return label.Label{}, false, fmt.Errorf("%w: named_ports[%d].port: 0 is no port", ErrNamedPort, i)
		case p.Protocol != TCP && p.Protocol != UDP && p.Protocol != SCTP:
			return label.Label{}, false, fmt.Errorf("%w: named_ports[%d].protocol: %q has no ports", ErrNamedPort, i, p.Protocol)
		}
		texts[i] = p.Name + "." + string(p.Protocol) + "." + strconv.Itoa(int(p.Port))
	}
	slices.Sort(texts)
	value := strings.Join(slices.Compact(texts), "_")
	if len(value) > label.MaxValue {
		return label.Label{}, false, fmt.Errorf("%w: named_ports: %d bytes together, at most %d are allowed", ErrNamedPort, len(value), label.MaxValue)
	}
	return label.Label{Source: label.SourceGenerated, Key: KeyNamedPorts, Value: value}, true, nil
}

// Workload makes the label set of a workload from what its runtime says:
// checked, filtered, with the hidden label of its ports. A workload that has
// nothing left gets the one set that stands for no labels.
func Workload(f Filter, labels []label.Label, ports []NamedPort) (label.Canonical, error) {
	if err := CheckCaller(labels); err != nil {
		return label.Canonical{}, err
	}
	kept := f.Apply(labels)
	port, ok, err := NamedPortsLabel(ports)
	if err != nil {
		return label.Canonical{}, err
	}
	if ok {
		kept = append(kept, port)
	}
	if len(kept) == 0 {
		kept = append(kept, label.Label{Source: label.SourceGenerated, Key: label.KeyNoLabels})
	}
	set, err := label.Canonicalize(kept...)
	if lerr := (*label.Error)(nil); errors.As(err, &lerr) && lerr.Index >= 0 {
		// The index counts what the filter kept; the caller knows its own list.
		lerr.Index = slices.Index(labels, kept[lerr.Index])
	}
	return set, err
}
