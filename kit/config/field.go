// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package config

import (
	"encoding"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
)

// field is one key and the variable that it sets.
type field struct {
	key, flag, env string
	help           string
	enum           []string
	secret         bool
	value          reflect.Value
	def            string // default as text
	was            *field // key, flag and variable before a rename; nil if the key was never renamed
	source         Source
}

var (
	durationType    = reflect.TypeFor[time.Duration]()
	unmarshalerType = reflect.TypeFor[encoding.TextUnmarshaler]()
)

// fieldsOf lists the keys of the struct that ptr points to. Its errors are bugs in the struct, not mistakes of a user.
func fieldsOf(ptr any) ([]*field, error) {
	v := reflect.ValueOf(ptr).Elem()
	if v.Kind() != reflect.Struct {
		return nil, fmt.Errorf("configuration of type %s is not a struct", v.Type())
	}
	fields, err := walk(v, "")
	if err != nil {
		return nil, err
	}
	seen := map[string]string{
		"config": "--config", "instance": "--instance", "print-config": "--print-config",
		"version": "--version", "help": "--help", "h": "-h",
	}
	for _, f := range fields {
		if other, ok := seen[f.flag]; ok {
			return nil, fmt.Errorf("key %s and %s are both the flag --%s", f.key, other, f.flag)
		}
		seen[f.flag] = f.key
	}
	return fields, nil
}

func walk(v reflect.Value, at string) ([]*field, error) {
	var fields []*field
	for i := range v.NumField() {
		sf := v.Type().Field(i)
		tag, ok := sf.Tag.Lookup("config")
		if !ok {
			continue
		}
		if !sf.IsExported() {
			return nil, fmt.Errorf("field %s.%s has a config tag and is not exported", v.Type(), sf.Name)
		}
		name, opt, _ := strings.Cut(tag, ",")
		key := at + name
		group := sf.Type.Kind() == reflect.Struct && !reflect.PointerTo(sf.Type).Implements(unmarshalerType)
		switch {
		case group && opt == "inline" && name == "":
			key = strings.TrimSuffix(at, ".")
		case opt != "" || name == "" || sf.Anonymous || strings.Contains(name, "."):
			return nil, fmt.Errorf("field %s.%s: bad config tag %q", v.Type(), sf.Name, tag)
		}
		if group {
			sub := key
			if sub != "" {
				sub += "."
			}
			inner, err := walk(v.Field(i), sub)
			if err != nil {
				return nil, err
			}
			fields = append(fields, inner...)
			continue
		}
		f := &field{
			key: key, flag: kebab(key), env: envName(key),
			help: sf.Tag.Get("help"), secret: sf.Tag.Get("secret") == "true",
			value: v.Field(i), source: FromDefault,
		}
		if old := sf.Tag.Get("was"); old != "" {
			old = at + old
			f.was = &field{key: old, flag: kebab(old), env: envName(old)}
		}
		if e := sf.Tag.Get("enum"); e != "" {
			f.enum = strings.Split(e, ",")
		}
		if err := supported(sf.Type, true); err != nil {
			return nil, fmt.Errorf("field %s.%s: %w", v.Type(), sf.Name, err)
		}
		f.def = f.text()
		fields = append(fields, f)
	}
	return fields, nil
}

func supported(t reflect.Type, list bool) error {
	switch {
	case reflect.PointerTo(t).Implements(unmarshalerType):
		return nil
	case t.Kind() == reflect.Slice && list:
		return supported(t.Elem(), false)
	case t.Kind() == reflect.Map && list && t.Key().Kind() == reflect.String && t.Elem().Kind() == reflect.String:
		return nil
	}
	switch t.Kind() {
	case reflect.String, reflect.Bool, reflect.Float64, reflect.Float32,
		reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64,
		reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return nil
	}
	return fmt.Errorf("type %s cannot be configured", t)
}

// kebab turns "store.maxSize" into "store-max-size" and "podCIDRs" into "pod-cidrs".
func kebab(key string) string {
	var b strings.Builder
	r := []rune(key)
	for i, c := range r {
		switch {
		case c == '.':
			b.WriteByte('-')
		case unicode.IsUpper(c):
			if i > 0 && r[i-1] != '.' && !unicode.IsUpper(r[i-1]) {
				b.WriteByte('-')
			}
			b.WriteRune(unicode.ToLower(c))
		default:
			b.WriteRune(c)
		}
	}
	return b.String()
}

// envName makes "etcd.leaseTTL" "ETCD_LEASE_TTL".
func envName(key string) string { return strings.ToUpper(strings.ReplaceAll(kebab(key), "-", "_")) }

func (f *field) isBool() bool {
	return f.value.Kind() == reflect.Bool && !reflect.PointerTo(f.value.Type()).Implements(unmarshalerType)
}

func (f *field) isList() bool {
	return f.value.Kind() == reflect.Slice && !reflect.PointerTo(f.value.Type()).Implements(unmarshalerType)
}
func (f *field) isMap() bool { return f.value.Kind() == reflect.Map }

// set parses the text of a flag or a variable.
func (f *field) set(text string, from Source, where string) []error {
	switch {
	case f.isList():
		var items []string
		if strings.TrimSpace(text) != "" {
			for _, item := range strings.Split(text, ",") {
				items = append(items, strings.TrimSpace(item))
			}
		}
		return f.setList(items, from, func(int) string { return where })
	case f.isMap():
		m := map[string]string{}
		var errs []error
		for _, item := range strings.Split(text, ",") {
			if strings.TrimSpace(item) == "" {
				continue
			}
			k, v, ok := strings.Cut(item, "=")
			k = strings.TrimSpace(k)
			if _, twice := m[k]; !ok || k == "" || twice {
				errs = append(errs, &Problem{
					Key: f.key, Where: where,
					Err: fmt.Errorf("%q is not name=value, or repeats a name", item),
				})
				continue
			}
			m[k] = strings.TrimSpace(v)
		}
		if errs == nil {
			f.setMap(m, from)
		}
		return errs
	}
	if err := f.parse(f.value, text); err != nil {
		return []error{&Problem{Key: f.key, Where: where, Err: err}}
	}
	f.source = from
	return nil
}

func (f *field) setList(items []string, from Source, where func(i int) string) []error {
	list := reflect.MakeSlice(f.value.Type(), len(items), len(items))
	var errs []error
	for i, item := range items {
		if err := f.parse(list.Index(i), item); err != nil {
			errs = append(errs, &Problem{Key: fmt.Sprintf("%s[%d]", f.key, i), Where: where(i), Err: err})
		}
	}
	if errs == nil {
		f.value.Set(list)
		f.source = from
	}
	return errs
}

func (f *field) setMap(m map[string]string, from Source) {
	v := reflect.MakeMapWithSize(f.value.Type(), len(m))
	for k, e := range m {
		v.SetMapIndex(reflect.ValueOf(k).Convert(f.value.Type().Key()), reflect.ValueOf(e).Convert(f.value.Type().Elem()))
	}
	f.value.Set(v)
	f.source = from
}

func (f *field) parse(v reflect.Value, text string) error {
	if f.enum != nil && !slices.Contains(f.enum, text) {
		return fmt.Errorf("%q is not one of %s", text, strings.Join(f.enum, ", "))
	}
	if u, ok := v.Addr().Interface().(encoding.TextUnmarshaler); ok {
		fresh := reflect.New(v.Type())
		if err := fresh.Interface().(encoding.TextUnmarshaler).UnmarshalText([]byte(text)); err != nil {
			return fmt.Errorf("%q is not a valid %s: %w", text, typeName(v.Type()), err)
		}
		_ = u
		v.Set(fresh.Elem())
		return nil
	}
	if v.Type() == durationType {
		d, err := time.ParseDuration(text)
		if err != nil {
			return fmt.Errorf("%q is not a duration such as 300ms, 1.5s or 2h", text)
		}
		v.SetInt(int64(d))
		return nil
	}
	bits := 64
	if k := v.Kind(); k != reflect.String && k != reflect.Bool {
		bits = v.Type().Bits()
	}
	var err error
	switch v.Kind() {
	case reflect.String:
		v.SetString(text)
	case reflect.Bool:
		switch text {
		case "true":
			v.SetBool(true)
		case "false":
			v.SetBool(false)
		default:
			return fmt.Errorf("%q is neither true nor false", text)
		}
	case reflect.Float32, reflect.Float64:
		var n float64
		if n, err = strconv.ParseFloat(text, bits); err == nil {
			v.SetFloat(n)
		}
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		var n uint64
		if n, err = strconv.ParseUint(text, 10, bits); err == nil {
			v.SetUint(n)
		}
	default:
		var n int64
		if n, err = strconv.ParseInt(text, 10, bits); err == nil {
			v.SetInt(n)
		}
	}
	switch {
	case errors.Is(err, strconv.ErrRange):
		return fmt.Errorf("%s is out of the range of %s", text, v.Kind())
	case err != nil:
		return fmt.Errorf("%q is not a number (%s)", text, v.Kind())
	}
	return nil
}

// typeName returns the type's name in messages to users.
func typeName(t reflect.Type) string {
	switch t.String() {
	case "netip.Prefix":
		return "CIDR"
	case "netip.Addr":
		return "IP address"
	case "config.ByteSize":
		return "size"
	case "netip.AddrPort":
		return "IP address and port"
	}
	return strings.ToLower(t.Name())
}

func (f *field) text() string {
	if f.secret && !f.value.IsZero() {
		return "(secret)"
	}
	switch {
	case f.isList():
		items := make([]string, f.value.Len())
		for i := range items {
			items[i] = textOf(f.value.Index(i))
		}
		return strings.Join(items, ",")
	case f.isMap():
		var items []string
		for _, k := range f.value.MapKeys() {
			items = append(items, k.String()+"="+f.value.MapIndex(k).String())
		}
		slices.Sort(items)
		return strings.Join(items, ",")
	}
	return textOf(f.value)
}

func textOf(v reflect.Value) string {
	if v.CanAddr() {
		if m, ok := v.Addr().Interface().(encoding.TextMarshaler); ok {
			if b, err := m.MarshalText(); err == nil {
				return string(b)
			}
		}
	}
	return fmt.Sprint(v.Interface())
}

// validate validates the groups, then the struct that contains them. It skips an embedded group's method that Go
// promotes to the struct, because its problems would be reported twice.
func validate(ptr any) []error {
	var errs []error
	seen := map[string]bool{}
	for _, err := range validateAt(reflect.ValueOf(ptr).Elem(), "") {
		if !seen[err.Error()] {
			seen[err.Error()] = true
			errs = append(errs, err)
		}
	}
	return errs
}

// keyed is an error of Validate about one key, from packages that do not import this one.
type keyed interface {
	error
	Key() string // relative to the struct
	Unwrap() error
}

func validateAt(v reflect.Value, at string) []error {
	var errs []error
	for i := range v.NumField() {
		sf := v.Type().Field(i)
		tag, ok := sf.Tag.Lookup("config")
		if !ok || sf.Type.Kind() != reflect.Struct || reflect.PointerTo(sf.Type).Implements(unmarshalerType) {
			continue
		}
		name, _, _ := strings.Cut(tag, ",")
		sub := at
		if name != "" {
			sub += name + "."
		}
		errs = append(errs, validateAt(v.Field(i), sub)...)
	}
	if val, ok := v.Addr().Interface().(interface{ Validate() error }); ok {
		for _, err := range All(val.Validate()) {
			if p, ok := errors.AsType[*Problem](err); ok {
				err = &Problem{Key: at + p.Key, Where: p.Where, Err: p.Err}
			} else if k, ok := errors.AsType[keyed](err); ok {
				err = &Problem{Key: at + k.Key(), Err: k.Unwrap()}
			} else {
				err = &Problem{Key: strings.TrimSuffix(at, "."), Err: err}
			}
			errs = append(errs, err)
		}
	}
	return errs
}
