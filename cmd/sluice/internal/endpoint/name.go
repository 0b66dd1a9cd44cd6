// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package endpoint

import (
	"slices"
	"strings"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/workload"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// Prefixes that mark a name as a container or as a pod.
const (
	podPrefix       = "pod:"
	containerPrefix = "container:"
)

const (
	defaultNamespace = "default"
	defaultInterface = "eth0"
	maxInterface     = 15 // longest name of a network interface
)

// NameForms describes the argument of commands about one endpoint.
const NameForms = "a container or a pod: CONTAINER[/INTERFACE] or NAMESPACE/NAME"

// NameHelp is the help of commands about one endpoint.
const NameHelp = `CONTAINER is the ID of a container or a prefix of it, with an optional interface:
CONTAINER[/INTERFACE]. POD is NAMESPACE/NAME of a pod of this node. If a container and a pod
have the same name, container:CONTAINER[/INTERFACE] or pod:NAMESPACE/NAME selects one.`

// Name is the name of a container or a pod as given on the command line: CONTAINER[/INTERFACE], NAMESPACE/NAME of a
// pod, container:CONTAINER[/INTERFACE] or pod:[NAMESPACE/]NAME. CONTAINER/INTERFACE and NAMESPACE/NAME look alike, so a
// Name may be either.
type Name struct {
	text              string
	container, ifname string // container is empty if the name can only be a pod's
	namespace, pod    string // pod is empty if the name can only be a container's
}

// HasPrefix reports whether the text begins with "pod:" or "container:". Such a text is a name and not a label.
func HasPrefix(text string) bool {
	return (strings.HasPrefix(text, podPrefix) || strings.HasPrefix(text, containerPrefix)) &&
		!strings.ContainsAny(text, "=,!( ")
}

// ParseName parses the name of a container or a pod.
func ParseName(text string) (Name, error) {
	if rest, ok := strings.CutPrefix(text, podPrefix); ok {
		namespace, pod, found := strings.Cut(rest, "/")
		if !found {
			namespace, pod = defaultNamespace, rest
		}
		if namespace == "" || pod == "" || strings.Contains(pod, "/") {
			return Name{}, invocation.Usagef("%q is not pod:[NAMESPACE/]NAME", text)
		}
		return Name{text: text, namespace: namespace, pod: pod}, nil
	}
	rest, isContainer := strings.CutPrefix(text, containerPrefix)
	first, second, slash := strings.Cut(rest, "/")
	switch {
	case first == "" || strings.Contains(second, "/"), slash && second == "":
		return Name{}, invocation.Usagef("%q is neither CONTAINER[/INTERFACE] nor the pod NAMESPACE/NAME", text)
	case isContainer || !slash:
		return Name{text: text, container: first, ifname: second}, nil
	}
	return Name{text: text, container: first, ifname: second, namespace: first, pod: second}, nil
}

// Owner returns the owner with the name's container, whose ID must be complete, and its interface, eth0 by default. It
// returns nil if the name can only be a pod's.
func (n Name) Owner() *workloadv1.Owner {
	if n.container == "" || len(n.ifname) > maxInterface {
		return nil
	}
	o := &workloadv1.Owner{ContainerId: n.container, InterfaceName: n.ifname}
	if o.GetInterfaceName() == "" {
		o.InterfaceName = defaultInterface
	}
	return o
}

// Pod returns the pod; nil if the name can only be a container's.
func (n Name) Pod() *datapathv1.PodName {
	if n.pod == "" {
		return nil
	}
	return &datapathv1.PodName{Namespace: n.namespace, Name: n.pod}
}

// Whole reports whether the name has a container and an interface.
func (n Name) Whole() bool { return n.container != "" && n.ifname != "" }

// Find returns the endpoints that match the name: of the container with this ID, if there is one; else of the pod, if
// there is one; else of all containers whose IDs begin with the name. isPod is true if they belong to the pod. Find
// returns an error if the name is both the ID of a container and the name of another pod.
func (n Name) Find(all []*datapathv1.Endpoint) (found []*datapathv1.Endpoint, isPod bool, err error) {
	matching := func(match func(*datapathv1.Endpoint) bool) []*datapathv1.Endpoint {
		return slices.DeleteFunc(slices.Clone(all), func(e *datapathv1.Endpoint) bool { return !match(e) })
	}
	container := func(match func(id, start string) bool) func(*datapathv1.Endpoint) bool {
		return func(e *datapathv1.Endpoint) bool {
			o := e.GetOwner()
			return n.container != "" && match(o.GetContainerId(), n.container) &&
				(n.ifname == "" || o.GetInterfaceName() == n.ifname)
		}
	}
	exact := matching(container(func(id, name string) bool { return id == name }))
	pods := matching(func(e *datapathv1.Endpoint) bool {
		p := e.GetPod()
		return n.pod != "" && p.GetName() == n.pod && p.GetNamespace() == n.namespace
	})
	switch {
	case len(exact) > 0 && len(pods) > 0 && !slices.Contains(pods, exact[0]):
		return nil, false, invocation.Usagef("%q is a container and a pod: give %s%s or %s%s", n.text, containerPrefix,
			n.text, podPrefix, n.text)
	case len(exact) > 0:
		return exact, false, nil
	case len(pods) > 0:
		return pods, true, nil
	}
	return matching(container(strings.HasPrefix)), false, nil
}

// Match returns the only endpoint with the name, or nil if no endpoint has it.
func (n Name) Match(all []*datapathv1.Endpoint) (*datapathv1.Endpoint, error) {
	found, _, err := n.Find(all)
	switch {
	case err != nil || len(found) == 0:
		return nil, err
	case len(found) == 1:
		return found[0], nil
	}
	names := make([]string, 0, len(found))
	for _, e := range found {
		o := workload.OwnerOf(e.GetOwner())
		names = append(names, o.ContainerID+"/"+o.Interface)
	}
	return nil, invocation.Usagef("%q could be %s", n.text, strings.Join(names, " or "))
}

// Match parses the name of a container or a pod, and returns the only endpoint with the name, or nil if no endpoint has
// it.
func Match(all []*datapathv1.Endpoint, text string) (*datapathv1.Endpoint, error) {
	n, err := ParseName(text)
	if err != nil {
		return nil, err
	}
	return n.Match(all)
}
