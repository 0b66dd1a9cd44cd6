// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kubernetes

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kube"
	"github.com/sluice-net/sluice/services/controller/internal/lbipam"
)

const (
	poolKind     = "CiliumLoadBalancerIPPool"
	poolResource = "ciliumloadbalancerippools"
)

// poolVersions are the versions of the kind, the preferred one first.
var poolVersions = []string{"v2", "v2alpha1"}

// poolsEvery is the interval between two queries whether the API server has pools.
const poolsEvery = 10 * time.Second

// Annotations of Services about their addresses. Older names come last.
var (
	requestAnnotations = []string{"lbipam.cilium.io/ips", "io.cilium/lb-ipam-ips"}
	keyAnnotations     = []string{"lbipam.cilium.io/sharing-key", "io.cilium/lb-ipam-sharing-key"}
	crossAnnotations   = []string{
		"lbipam.cilium.io/sharing-cross-namespace", "io.cilium/lb-ipam-sharing-cross-namespace",
	}
)

// Balancers follows pools of addresses and Services, and passes them to an lbipam.Allocator. It follows Services only
// while the API server has the kind of pools.
type Balancers struct {
	api  *kube.Client
	core *rest.RESTClient
	to   *lbipam.Allocator
	log  *slog.Logger
}

// NewBalancers returns Balancers.
func NewBalancers(api *kube.Client, to *lbipam.Allocator, l *slog.Logger) (*Balancers, error) {
	core, err := api.REST(corev1.SchemeGroupVersion, corev1.AddToScheme)
	if err != nil {
		return nil, err
	}
	return &Balancers{api: api, core: core, to: to, log: l}, nil
}

// Run follows the objects until ctx ends; it then returns nil.
func (b *Balancers) Run(ctx context.Context) error {
	failure := ""
	for ctx.Err() == nil {
		version, err := b.version(ctx)
		switch {
		case err != nil && ctx.Err() == nil && err.Error() != failure:
			failure = err.Error()
			b.log.Warn("cannot find out whether the API server has "+poolResource, log.Err(err))
		case err == nil:
			failure = ""
		}
		if version != "" {
			b.log.Info("services of type LoadBalancer get addresses of pools", "kind", poolKind, "version", version)
			if err := b.follow(ctx, version); err != nil {
				return err
			}
			b.to.SetListed(lbipam.Pools, false)
			b.to.SetListed(lbipam.Services, false)
		}
		select {
		case <-time.After(poolsEvery):
		case <-ctx.Done():
		}
	}
	return nil
}

// version returns the version of pools that the API server has; empty: none.
func (b *Balancers) version(ctx context.Context) (string, error) {
	for _, version := range poolVersions {
		body, err := b.core.Get().AbsPath("/apis/cilium.io", version).
			SetHeader("Accept", runtime.ContentTypeJSON).Timeout(requestTimeout).Do(ctx).Raw()
		if apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return "", err
		}
		var list struct {
			Resources []struct {
				Name string `json:"name"`
			} `json:"resources"`
		}
		if err := json.Unmarshal(body, &list); err != nil {
			return "", fmt.Errorf("resources of cilium.io/%s: %w", version, err)
		}
		for _, r := range list.Resources {
			if r.Name == poolResource {
				return version, nil
			}
		}
	}
	return "", nil
}

// follow follows pools and Services until ctx ends or the API server no longer has pools.
func (b *Balancers) follow(ctx context.Context, version string) error {
	gv := schema.GroupVersion{Group: "cilium.io", Version: version}
	client, err := kube.ObjectClient(b.api.Config, b.core.Client, gv.WithKind(poolKind), &pool{}, &pools{})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var following sync.WaitGroup
	following.Go(func() {
		_ = kube.Follow(ctx, b.api, kube.Kind[*lbipam.Pool]{ // it always returns nil
			Client: client, Resource: poolResource, Type: &pool{},
			Trim: func(o runtime.Object) *lbipam.Pool { return o.(*pool).pool() },
		}, poolHandler{b.to, cancel}, b.log)
	})
	following.Go(func() {
		_ = kube.Follow(ctx, b.api, kube.Kind[*lbipam.Service]{
			Client: b.core, Resource: "services", Type: &corev1.Service{}, Last: true,
			Trim: func(o runtime.Object) *lbipam.Service { return serviceOf(o.(*corev1.Service)) },
		}, serviceHandler{b.to}, b.log)
	})
	following.Wait()
	return nil
}

// poolHandler implements kube.Handler.
type poolHandler struct {
	to      *lbipam.Allocator
	missing func()
}

func (h poolHandler) Upsert(_ types.NamespacedName, p *lbipam.Pool) { h.to.UpsertPool(p) }
func (h poolHandler) Delete(n types.NamespacedName)                 { h.to.DeletePool(n.Name) }
func (h poolHandler) Complete()                                     { h.to.SetListed(lbipam.Pools, true) }

func (h poolHandler) Failed(err error) {
	if apierrors.IsNotFound(err) {
		h.missing()
	}
}

// serviceHandler implements kube.Handler.
type serviceHandler struct{ to *lbipam.Allocator }

func (h serviceHandler) Upsert(_ types.NamespacedName, s *lbipam.Service) { h.to.UpsertService(s) }
func (h serviceHandler) Delete(n types.NamespacedName)                    { h.to.DeleteService(lbipam.Key(n)) }

func (h serviceHandler) Complete()    { h.to.SetListed(lbipam.Services, true) }
func (h serviceHandler) Failed(error) {} // Follow logs it; what is known stays

// serviceOf returns the part of a Service that addresses depend on. Services that are not balanced and never were keep
// their cluster addresses only, because there are many.
func serviceOf(o *corev1.Service) *lbipam.Service {
	s := &lbipam.Service{
		Key: lbipam.Key{Namespace: o.Namespace, Name: o.Name}, UID: string(o.UID), ResourceVersion: o.ResourceVersion,
		Generation: o.Generation, Created: o.CreationTimestamp.Time,
		Balanced: o.Spec.Type == corev1.ServiceTypeLoadBalancer, Deleting: o.DeletionTimestamp != nil,
	}
	for _, c := range o.Status.Conditions {
		s.Conditions = append(s.Conditions, lbipam.Condition{
			Type: c.Type, Status: string(c.Status), Reason: c.Reason, Message: c.Message,
			ObservedGeneration: c.ObservedGeneration, LastTransitionTime: c.LastTransitionTime.UTC(),
		})
	}
	for _, text := range o.Spec.ClusterIPs {
		if a, err := netip.ParseAddr(text); err == nil {
			s.ClusterIPs = append(s.ClusterIPs, a)
		}
	}
	if !s.Balanced && len(s.Conditions) == 0 {
		return s
	}
	s.Labels, s.Class = o.Labels, o.Spec.LoadBalancerClass
	for _, f := range o.Spec.IPFamilies {
		s.Bits = append(s.Bits, map[corev1.IPFamily]int{corev1.IPv4Protocol: 32, corev1.IPv6Protocol: 128}[f])
	}
	if policy := o.Spec.IPFamilyPolicy; policy != nil {
		s.Families = map[corev1.IPFamilyPolicy]lbipam.Families{
			corev1.IPFamilyPolicyPreferDualStack: lbipam.Prefer, corev1.IPFamilyPolicyRequireDualStack: lbipam.Require,
		}[*policy]
	}
	s.Requested = list(first(o.Annotations, requestAnnotations))
	if o.Spec.LoadBalancerIP != "" && len(s.Requested) == 0 {
		s.Requested = []string{o.Spec.LoadBalancerIP}
	}
	s.SharingKey, s.SharedWith = first(o.Annotations, keyAnnotations), list(first(o.Annotations, crossAnnotations))
	for _, p := range o.Spec.Ports {
		s.Ports = append(s.Ports, lbipam.Port{Protocol: string(p.Protocol), Number: p.Port})
	}
	s.Local = o.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal
	s.Backends = o.Namespace + "/" + labels.SelectorFromSet(o.Spec.Selector).String()
	for _, in := range o.Status.LoadBalancer.Ingress {
		if a, err := netip.ParseAddr(in.IP); err == nil {
			s.Ingress = append(s.Ingress, a)
		}
		s.Hostname = s.Hostname || in.Hostname != ""
	}
	return s
}

// first returns the value of the first annotation that an object has.
func first(annotations map[string]string, keys []string) string {
	for _, key := range keys {
		if value, ok := annotations[key]; ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// list splits a list with commas. Repeated items are left out.
func list(text string) (items []string) {
	seen := make(map[string]bool)
	for item := range strings.SplitSeq(text, ",") {
		if item = strings.TrimSpace(item); item != "" && !seen[item] {
			seen[item] = true
			items = append(items, item)
		}
	}
	return items
}

// pool is a CiliumLoadBalancerIPPool.
type pool struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`
	Spec              struct {
		Blocks          []block               `json:"blocks"`
		CIDRs           []block               `json:"cidrs"` // name of blocks in old objects
		ServiceSelector *metav1.LabelSelector `json:"serviceSelector"`
		FirstLast       string                `json:"allowFirstLastIPs"`
		Disabled        bool                  `json:"disabled"`
	} `json:"spec"`
	Status struct {
		Conditions []lbipam.Condition `json:"conditions"`
	} `json:"status"`
}

type block struct {
	CIDR  string `json:"cidr"`
	Start string `json:"start"`
	Stop  string `json:"stop"`
}

// Keys of a serviceSelector in addition to the labels of a Service.
const (
	keyName      = "io.kubernetes.service.name"
	keyNamespace = "io.kubernetes.service.namespace"
)

// selectable implements labels.Labels: the labels of a Service, its name and its namespace.
type selectable struct{ *lbipam.Service }

// Lookup implements labels.Labels.
func (s selectable) Lookup(key string) (string, bool) {
	switch key {
	case keyName:
		return s.Name, true
	case keyNamespace:
		return s.Namespace, true
	}
	value, ok := s.Labels[key]
	return value, ok
}

// Has implements labels.Labels.
func (s selectable) Has(key string) bool {
	_, ok := s.Lookup(key)
	return ok
}

// Get implements labels.Labels.
func (s selectable) Get(key string) string {
	value, _ := s.Lookup(key)
	return value
}

// pools is a list of pools.
type pools struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata"`
	Items           []pool `json:"items"`
}

// DeepCopyObject implements runtime.Object. Nothing changes the objects, so the copy shares the slices.
func (p *pool) DeepCopyObject() runtime.Object {
	c := *p
	return &c
}

// DeepCopyObject implements runtime.Object.
func (p *pools) DeepCopyObject() runtime.Object {
	c := *p
	c.Items = slices.Clone(p.Items)
	return &c
}

// pool converts the object.
func (p *pool) pool() *lbipam.Pool {
	out := &lbipam.Pool{
		Name: p.Name, UID: string(p.UID), ResourceVersion: p.ResourceVersion, Generation: p.Generation,
		Created: p.CreationTimestamp.Time, Disabled: p.Spec.Disabled, Conditions: p.Status.Conditions,
	}
	var blocks []lbipam.Block
	for _, b := range append(slices.Clone(p.Spec.Blocks), p.Spec.CIDRs...) {
		blocks = append(blocks, lbipam.Block(b))
	}
	out.Ranges, out.Faults = lbipam.NewRanges(blocks, p.Spec.FirstLast != "No")
	if p.Spec.ServiceSelector != nil {
		selector, err := metav1.LabelSelectorAsSelector(p.Spec.ServiceSelector)
		if err != nil {
			selector = labels.Nothing()
			out.Faults = append(out.Faults, fmt.Sprintf("spec.serviceSelector: %v", err))
		}
		out.Selects = func(s *lbipam.Service) bool { return selector.Matches(selectable{s}) }
	}
	return out
}

// SetService implements lbipam.API.
func (w *Writer) SetService(
	ctx context.Context, k lbipam.Key, uid, version string, ingress, conditions []byte,
) (string, error) {
	return w.setStatus(ctx, []string{"/api/v1/namespaces", k.Namespace, "services", k.Name, "status"}, uid, version,
		map[string]any{
			"loadBalancer": map[string]any{"ingress": json.RawMessage(ingress)}, "conditions": json.RawMessage(conditions),
		})
}

// SetPool implements lbipam.API. The API server converts versions, so each of them will do.
func (w *Writer) SetPool(ctx context.Context, name, uid, version string, conditions []byte) (string, error) {
	var err error
	for _, v := range poolVersions {
		version, err = w.setStatus(ctx, []string{"/apis/cilium.io", v, poolResource, name, "status"}, uid, version,
			map[string]any{"conditions": json.RawMessage(conditions)})
		if !apierrors.IsNotFound(err) {
			break
		}
	}
	return version, err
}

// setStatus merges fields into the status of an object, and returns the new resource version. After an error, it
// returns the former version.
func (w *Writer) setStatus(
	ctx context.Context, path []string, uid, version string, status map[string]any,
) (string, error) {
	body, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"resourceVersion": version, "uid": uid}, "status": status,
	})
	if err != nil {
		return version, err
	}
	answer, err := w.client.Patch(types.MergePatchType).AbsPath(path...).Timeout(requestTimeout).Body(body).Do(ctx).Raw()
	if err != nil {
		return version, explained(err)
	}
	var o metav1.PartialObjectMetadata
	if err := json.Unmarshal(answer, &o); err != nil {
		return version, err
	}
	return o.ResourceVersion, nil
}
